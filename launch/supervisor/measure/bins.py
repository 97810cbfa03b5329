"""Sums by time (or by any other number) in bounded memory, made while a long record is read."""


class Bins:
    """Amounts along an axis that begins at 0. When the axis outgrows the bins, two and two become one: their width doubles."""

    def __init__(self, width, most=400):
        self.width, self._most = width, most
        self.amounts = {}  # name: a list, a sum for each bin
        self.end = 0.0

    def add(self, at, amounts):
        """The whole amounts at one place."""
        self._reach(at)
        for name, amount in amounts.items():
            self._of(name)[int(at / self.width)] += amount

    def spread(self, begin, end, amounts):
        """The amounts evenly from `begin` to `end`. The sum over all bins is the amount, but for rounding."""
        if end <= begin:
            self.add(begin, amounts)
            return
        self._reach(end)
        first, last = int(begin / self.width), int(end / self.width)
        for name, amount in amounts.items():
            sums = self._of(name)
            for index in range(first, last + 1):
                part = min(end, (index + 1) * self.width) - max(begin, index * self.width)
                sums[index] += amount * part / (end - begin)

    def _of(self, name):
        """The list of that name, as long as the others."""
        wanted = int(self.end / self.width) + 1
        sums = self.amounts.setdefault(name, [])
        sums += [0] * (wanted - len(sums))
        return sums

    def _reach(self, at):
        self.end = max(self.end, at)
        while int(self.end / self.width) >= self._most:
            self.width *= 2
            for sums in self.amounts.values():
                sums[:] = [sum(sums[i : i + 2]) for i in range(0, len(sums), 2)]

    def rows(self, digits=7):
        """{name: sums}, all of one length, rounded to so many digits."""
        for name in self.amounts:
            self._of(name)
        return {name: [_rounded(value, digits) for value in sums] for name, sums in self.amounts.items()}


def _rounded(value, digits):
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")
