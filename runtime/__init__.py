"""From a bundle to tokens: manifest, decoder, cache, policies, generation. Never imports `convert`."""
