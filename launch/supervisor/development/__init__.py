"""Commands that need a checkout of the sources: building, testing, bundling."""
