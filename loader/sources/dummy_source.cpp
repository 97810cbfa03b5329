#include "loader/sources/dummy_source.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <span>

#include "common/trouble.h"
#include "loader/conversion.h"
#include "loader/tensor_list.h"

namespace poise {
namespace {

constexpr float kMatrixDeviation = 0.02F;
constexpr float kBiasDeviation = 0.01F;
// Of the sum of four independent uniform integers 0 … 255: sqrt(4 · (256² - 1) / 12), mean 510.
constexpr float kSumDeviation = 147.8005F;
constexpr std::int32_t kSumMean = 510;

float deviation_of(const WeightTensor& tensor, std::int32_t layers) {
  switch (tensor.weight) {
    case Weight::final_norm_weight:
    case Weight::attention_norm_weight:
    case Weight::mlp_norm_weight:
    case Weight::k_norm:
    case Weight::q_norm:
      return 0;
    case Weight::w_o:
    case Weight::fc2:
      return kMatrixDeviation / std::sqrt(2.0F * static_cast<float>(layers));
    default:
      return tensor.shape.size() > 1 ? kMatrixDeviation : kBiasDeviation;
  }
}

constexpr std::uint64_t scramble(std::uint64_t x) {
  x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdull;
  x = (x ^ (x >> 29)) * 0xc4ceb9fe1a85ec53ull;
  return x ^ (x >> 32);
}

// Two keyed rounds of multiply and xor-shift: every bit of the index and of both keys reaches every
// byte of the result, which is all that is asked of it here.
inline std::uint32_t mixed(std::uint32_t index, std::uint32_t key, std::uint32_t other_key) {
  std::uint32_t x = (index ^ key) * 0x9e3779b1u;
  x = ((x ^ (x >> 15)) + other_key) * 0x85ebca77u;
  x = (x ^ (x >> 13)) * 0xc2b2ae3du;
  return x ^ (x >> 16);
}

inline float element(std::uint32_t index, std::uint32_t key, std::uint32_t other_key, float scale) {
  const std::uint32_t x = mixed(index, key, other_key);
  const std::uint32_t pairs = (x & 0x00ff00ffu) + ((x >> 8) & 0x00ff00ffu);
  const auto sum = static_cast<std::int32_t>((pairs & 0xffffu) + (pairs >> 16));
  return static_cast<float>(sum - kSumMean) * scale;
}

inline void fill_run(std::uint32_t index, std::uint32_t key, std::uint32_t other_key, float scale,
                     float* out, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = element(index + static_cast<std::uint32_t>(i), key, other_key, scale);
  }
}

#if defined(__x86_64__)
// The same loop in a form that the compiler vectorises. The results are the same: it has only integers
// and one exact product.
__attribute__((target("avx2"))) void fill_run_wide(std::uint32_t index, std::uint32_t key,
                                                   std::uint32_t other_key, float scale, float* out,
                                                   std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    out[i] = element(index + static_cast<std::uint32_t>(i), key, other_key, scale);
  }
}
#endif

using Run = void (*)(std::uint32_t, std::uint32_t, std::uint32_t, float, float*, std::size_t);

std::uint64_t keys_of(std::uint64_t seed, std::uint64_t stream, std::uint64_t high) {
  return scramble(seed + scramble(stream + scramble(high + 1)));
}

// Random bytes as a panel's codes: of int8 any; of int4 -7 to 7, 0 twice as often; of float8 a sign, the
// exponent of 1 and a mantissa.
void fill_codes(std::uint64_t keys, Codes codes, std::span<std::byte> out) {
  const std::uint32_t kept = codes == Codes::float8 ? 0x87878787u : 0xffffffffu;
  const std::uint32_t set = codes == Codes::float8 ? 0x38383838u : 0;
  for (std::size_t i = 0; i < out.size(); i += 4) {
    const std::uint32_t word = mixed(static_cast<std::uint32_t>(i), static_cast<std::uint32_t>(keys),
                                     static_cast<std::uint32_t>(keys >> 32));
    std::uint32_t four = (word & kept) | set;
    if (codes == Codes::int4) {  // a half of 0, which is -8, becomes 8, which is 0
      const std::uint32_t any = four | four >> 1 | four >> 2 | four >> 3;
      four |= (~any & 0x11111111u) << 3;
    }
    std::memcpy(out.data() + i, &four, 4);
  }
}

// The standard deviation of these codes' values.
float code_deviation(Codes codes) {
  switch (codes) {
    case Codes::int4:
      return 4.183F;  // sqrt(2 · (1 + 4 + … + 49) / 16)
    case Codes::float8:
      return 1.456F;  // of 1, 1.125 … 1.875 with either sign: sqrt(mean of squares)
    default:
      return 73.90F;  // sqrt((256² - 1) / 12)
  }
}

Run fastest_run() {
#if defined(__x86_64__)
  static const bool wide = __builtin_cpu_supports("avx2") != 0;
  if (wide) {
    return fill_run_wide;
  }
#endif
  return fill_run;
}

}  // namespace

void fill_bell_shaped(std::uint64_t seed, std::uint64_t stream, std::int64_t first, float deviation,
                      std::span<float> out) {
  const float scale = deviation / kSumDeviation;
  const Run run = fastest_run();
  for (std::size_t done = 0; done < out.size();) {
    // Indices beyond 32 bits go into the keys.
    const std::uint64_t at = static_cast<std::uint64_t>(first) + done;
    const std::uint64_t high = at >> 32;
    const std::uint64_t keys = keys_of(seed, stream, high);
    const std::uint64_t until_next = (std::uint64_t{1} << 32) - (at & 0xffffffffu);
    const auto count =
        static_cast<std::size_t>(std::min<std::uint64_t>(until_next, out.size() - done));
    run(static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(keys),
        static_cast<std::uint32_t>(keys >> 32), scale, out.data() + done, count);
    done += count;
  }
}

DummySource::DummySource(const Family& family, const WeightLayout& layout, DType dtype,
                         std::uint64_t seed, const PackedFormat& packed)
    : tensors_(tensor_list(family, layout, family.prefixes.front())),
      packed_(packed),
      dtype_(dtype),
      seed_(seed) {
  for (const WeightTensor& tensor : tensors_) {
    deviation_.push_back(deviation_of(tensor, layout.layers));
    const auto matrix = std::ranges::find_if(layout.layer.entries, [&](const WeightEntry& entry) {
      return entry.packed &&
             (entry.weight == tensor.weight || groups_of(entry.weight) == tensor.weight);
    });
    inputs_.push_back(matrix == layout.layer.entries.end() ? 0 : matrix->cols);
  }
}

// Panels are streams of their own, behind those of the elements.
void DummySource::fill_panel(std::size_t tensor, std::int64_t number,
                             std::span<std::byte> panel) const {
  const PackedPanel map = packed_panel(packed_, inputs_[tensor]);
  check(panel.size() == static_cast<std::size_t>(map.bytes.n), "a panel is written whole");
  const auto codes = static_cast<std::size_t>(map.scales);
  fill_codes(keys_of(seed_, tensor, static_cast<std::uint64_t>(number) | std::uint64_t{1} << 63),
             packed_.codes, panel.first(codes));
  const float scale = deviation_[tensor] / code_deviation(packed_.codes);
  const auto size = static_cast<std::size_t>(size_of(packed_.scale_dtype).n);
  const std::span<std::byte> scales =
      panel.subspan(codes, static_cast<std::size_t>(map.zeros - map.scales));
  for (std::size_t at = 0; at < scales.size(); at += size) {
    convert(DType::float32, std::as_bytes(std::span(&scale, 1)), packed_.scale_dtype,
            scales.subspan(at, size));
  }
  std::ranges::fill(panel.subspan(static_cast<std::size_t>(map.zeros)), std::byte{0});
}

void DummySource::fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const {
  const WeightTensor& wanted = tensors_[tensor];
  if (wanted.packed) {
    const auto panel = static_cast<std::size_t>(wanted.unit.n);
    for (; !out.empty(); out = out.subspan(panel)) {
      fill_panel(tensor, first++, out.first(panel));
    }
    return;
  }
  if (is_groups(wanted.weight)) {
    for (; !out.empty(); out = out.subspan(2)) {
      const std::int64_t input = first++ % inputs_[tensor];
      const auto group = static_cast<std::uint16_t>(input / std::max(1, packed_.group));
      std::memcpy(out.data(), &group, 2);
    }
    return;
  }
  std::array<float, 4096> buffer;
  const auto element = static_cast<std::size_t>(size_of(dtype_).n);
  check(out.size() % element == 0, "only whole elements are filled");
  while (!out.empty()) {
    const std::size_t count = std::min(buffer.size(), out.size() / element);
    const std::span<float> values(buffer.data(), count);
    if (deviation_[tensor] == 0) {
      std::ranges::fill(values, 1.0F);
    } else {
      fill_bell_shaped(seed_, tensor, first, deviation_[tensor], values);
    }
    convert(DType::float32, std::as_bytes(values), dtype_, out.first(count * element));
    out = out.subspan(count * element);
    first += static_cast<std::int64_t>(count);
  }
}

}  // namespace poise
