#pragma once
// Attention of one row in float64, from plain arrays: where tests are not optimised, their time is spent here.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace poise::test {

// Over positions [first, last]; stored(position, 0) is its key, stored(position, 1) its value: `dim` numbers.
template <typename Number, typename Stored>
std::vector<double> exact_attention(const Number* query, std::int32_t first, std::int32_t last,
                                    std::int32_t dim, float scale, Stored stored) {
  std::vector<double> scores;
  for (std::int32_t t = first; t <= last; ++t) {
    const double* const key = stored(t, 0);
    double score = 0;
    for (std::int32_t d = 0; d < dim; ++d) {
      score += static_cast<double>(query[d]) * key[d];
    }
    scores.push_back(score * static_cast<double>(scale));
  }
  const double maximum = *std::max_element(scores.begin(), scores.end());
  double denominator = 0;
  std::vector<double> sums(static_cast<std::size_t>(dim));
  double* const out = sums.data();
  for (std::int32_t t = first; t <= last; ++t) {
    const double* const value = stored(t, 1);
    const double weight = std::exp(scores[static_cast<std::size_t>(t - first)] - maximum);
    denominator += weight;
    for (std::int32_t d = 0; d < dim; ++d) {
      out[d] += weight * value[d];
    }
  }
  for (double& x : sums) {
    x /= denominator;
  }
  return sums;
}

}  // namespace poise::test
