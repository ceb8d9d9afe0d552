"""Every decoder of bytes from outside, fed with what it does not expect."""
