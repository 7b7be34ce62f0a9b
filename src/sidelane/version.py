"""The version of this package, which ranks compare when they meet."""

VERSION = "0.3.0"
