"""A discrete-event simulation of both sites in virtual time, around the policies that the daemons run."""
