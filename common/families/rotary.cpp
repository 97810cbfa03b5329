#include "common/families/rotary.h"

#include <algorithm>
#include <cmath>
#include <numbers>
#include <span>

#include "common/trouble.h"

namespace poise {
namespace {

// base^(2i / dim) for each pair i. Exponent and result are float32; the power between them is taken in
// float64, so that it has the same bits with any math library.
std::vector<float> wavelengths(double base, std::int32_t dim) {
  std::vector<float> powers;
  for (std::int32_t i = 0; i < dim; i += 2) {
    const float exponent = static_cast<float>(i) / static_cast<float>(dim);
    powers.push_back(static_cast<float>(std::pow(base, static_cast<double>(exponent))));
  }
  return powers;
}

std::vector<float> plain(const RotaryShape& rotary, double base) {
  std::vector<float> frequencies = wavelengths(base, rotary.dim);
  for (float& f : frequencies) {
    f = 1.0F / f;
  }
  return frequencies;
}

std::vector<float> linear(const RotaryShape& rotary) {
  std::vector<float> frequencies = plain(rotary, static_cast<double>(rotary.theta));
  for (float& f : frequencies) {
    f /= rotary.factor;
  }
  return frequencies;
}

// NTK: the base grows with the length, in float32.
std::vector<float> dynamic(const RotaryShape& rotary, std::int32_t length) {
  const auto original = static_cast<float>(rotary.original_max_position_embeddings);
  const float longer = rotary.factor * static_cast<float>(length) / original - (rotary.factor - 1);
  const double dim = rotary.dim;
  const auto growth = static_cast<float>(std::pow(static_cast<double>(longer), dim / (dim - 2)));
  return plain(rotary, static_cast<double>(rotary.theta * growth));
}

// The pair that turns `rotations` times within the training's positions.
double correction_dim(const RotaryShape& rotary, double rotations) {
  return rotary.dim *
         std::log(rotary.original_max_position_embeddings / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(static_cast<double>(rotary.theta)));
}

std::vector<float> yarn(const RotaryShape& rotary) {
  double low = correction_dim(rotary, static_cast<double>(rotary.beta_fast));
  double high = correction_dim(rotary, static_cast<double>(rotary.beta_slow));
  if (rotary.truncate != 0) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, rotary.dim - 1.0);
  if (low == high) {
    high += 0.001;
  }
  std::vector<float> frequencies = wavelengths(static_cast<double>(rotary.theta), rotary.dim);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    const float ramp = std::clamp(
        (static_cast<float>(i) - static_cast<float>(low)) / static_cast<float>(high - low), 0.0F,
        1.0F);
    const float kept = 1.0F - ramp;
    frequencies[i] =
        1.0F / (rotary.factor * frequencies[i]) * (1.0F - kept) + 1.0F / frequencies[i] * kept;
  }
  return frequencies;
}

std::vector<float> longrope(const RotaryShape& rotary, const float* factors) {
  std::vector<float> frequencies = wavelengths(static_cast<double>(rotary.theta), rotary.dim);
  for (std::size_t i = 0; i < frequencies.size(); ++i) {
    frequencies[i] = 1.0F / (factors[i] * frequencies[i]);
  }
  return frequencies;
}

std::vector<float> llama3(const RotaryShape& rotary) {
  const auto original = static_cast<float>(rotary.original_max_position_embeddings);
  const float low_wavelength = original / rotary.low_freq_factor;
  const float high_wavelength = original / rotary.high_freq_factor;
  std::vector<float> frequencies = plain(rotary, static_cast<double>(rotary.theta));
  for (float& f : frequencies) {
    const float wavelength = 2 * std::numbers::pi_v<float> / f;
    if (wavelength > low_wavelength) {
      f = f / rotary.factor;
    } else if (wavelength >= high_wavelength) {
      const float smooth = (original / wavelength - rotary.low_freq_factor) /
                           (rotary.high_freq_factor - rotary.low_freq_factor);
      f = (1.0F - smooth) * f / rotary.factor + smooth * f;
    }
  }
  return frequencies;
}

// `set` as frequency_set counts.
std::vector<float> frequencies_of(const RotaryShape& rotary, std::int32_t set) {
  switch (rotary.kind) {
    case RotaryKind::none:
      break;
    case RotaryKind::plain:
      return plain(rotary, static_cast<double>(rotary.theta));
    case RotaryKind::linear:
      return linear(rotary);
    case RotaryKind::dynamic:
      return dynamic(rotary, rotary.original_max_position_embeddings + set);
    case RotaryKind::yarn:
      return yarn(rotary);
    case RotaryKind::longrope:
      return longrope(rotary, set == 0 ? rotary.short_factor : rotary.long_factor);
    case RotaryKind::llama3:
      return llama3(rotary);
  }
  check(false, "frequencies are asked of a model that rotates");
  return {};
}

}  // namespace

std::int32_t frequency_sets(const ModelShape& shape) {
  switch (shape.rotary.kind) {
    case RotaryKind::none:
      return 0;
    case RotaryKind::plain:
    case RotaryKind::linear:
    case RotaryKind::yarn:
    case RotaryKind::llama3:
      return 1;
    case RotaryKind::dynamic:
      return shape.max_position_embeddings - shape.rotary.original_max_position_embeddings + 1;
    case RotaryKind::longrope:
      return 2;
  }
  check(false, "the kind of rotary positions is one of those above");
  return 0;
}

std::vector<float> rotary_frequencies(const ModelShape& shape) {
  std::vector<float> table;
  for (std::int32_t set = 0; set < frequency_sets(shape); ++set) {
    const std::vector<float> one = frequencies_of(shape.rotary, set);
    table.insert(table.end(), one.begin(), one.end());
  }
  return table;
}

std::int32_t frequency_set(const ModelShape& shape, std::int32_t position,
                           std::int32_t prompt_tokens) {
  const std::int32_t sets = frequency_sets(shape);
  const std::int32_t length = std::max(position + 1, prompt_tokens);
  return std::clamp(length - shape.rotary.original_max_position_embeddings, 0,
                    std::max(sets - 1, 0));
}

bool depends_on_prompt(const ModelShape& shape) { return frequency_sets(shape) > 1; }

}  // namespace poise
