"""What every other room uses: how commands end, options, paths, sizes and times as text, facts about the machine."""
