"""What both daemons share: protocol, policies, scheduler, engine, life cycle. See docs/architecture.md."""
