"""Between chats and tokens: rendering prompts, tokenising, and parsing replies."""
