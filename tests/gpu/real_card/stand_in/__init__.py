"""What the tests of `tests/fake_card` ask of the stand-in, over a real GPU: there only results are checked."""
