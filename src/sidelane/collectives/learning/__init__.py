"""Learn which addresses of ordinary tensors come again, and copy between them without staging. See ``protocol``."""
