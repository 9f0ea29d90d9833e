"""Text to token ids and back, and chats to text: what a tokenizer and a chat template of a model directory do."""
