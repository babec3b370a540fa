"""The device, its memory and its copies: what a real run stands on."""
