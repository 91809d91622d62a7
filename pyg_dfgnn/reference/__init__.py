"""Plain torch versions of every op, for any dtype and device: the oracle of the tests and a baseline of the bench."""
