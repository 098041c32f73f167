"""From a source model to a bundle: one recipe per method, one source reader, one writer."""
