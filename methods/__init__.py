"""Other methods on SGSD's loop, each to be read beside its paper."""
