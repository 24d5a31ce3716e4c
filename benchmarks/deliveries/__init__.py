"""Ways to bring a batch from the bytes of HTTP responses to a trainer."""
