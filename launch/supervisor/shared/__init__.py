"""What every other room uses: how commands end, options, paths, sizes and times in words, the machine."""
