"""Other ways to train the same, each written the way its users write it, around one clock."""
