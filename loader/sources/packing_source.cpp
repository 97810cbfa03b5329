#include "loader/sources/packing_source.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

#include "common/trouble.h"
#include "loader/conversion.h"
#include "loader/sources/bfloat12_panel.h"

namespace poise {
namespace {

// A scale as it is stored, and its value.
struct StoredScale {
  std::array<std::byte, 4> bytes;
  float value;
};

StoredScale stored_scale(float scale, DType dtype) {
  StoredScale stored{};
  const std::span<std::byte> bytes(stored.bytes.data(), static_cast<std::size_t>(size_of(dtype).n));
  convert(DType::float32, std::as_bytes(std::span(&scale, 1)), dtype, bytes);
  convert(dtype, bytes, DType::float32, std::as_writable_bytes(std::span(&stored.value, 1)));
  return stored;
}

// The largest magnitude; not a number where a weight is not finite.
float magnitude_of(std::span<const float> weights) {
  float largest = 0;
  bool finite = true;
  for (const float weight : weights) {
    const float magnitude = std::fabs(weight);
    finite = finite && magnitude <= std::numeric_limits<float>::max();
    largest = magnitude > largest ? magnitude : largest;
  }
  return finite ? largest : std::numeric_limits<float>::quiet_NaN();
}

void round_group(std::span<const float> weights, float scale, float most, std::int8_t* codes) {
  if (!(scale > 0)) {
    std::fill_n(codes, weights.size(), std::int8_t{0});
    return;
  }
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const float code = std::nearbyint(weights[i] / scale);
    codes[i] = static_cast<std::int8_t>(code < -most ? -most : code > most ? most : code);
  }
}

}  // namespace

void round_panel(const PackedFormat& format, std::span<const float> rows,
                 std::span<std::byte> panel) {
  const std::size_t cols = rows.size() / kPackedRows;
  const PackedPanel map = packed_panel(format, static_cast<std::int32_t>(cols));
  check(panel.size() == static_cast<std::size_t>(map.bytes.n), "a panel is written whole");
  const std::size_t width = format.group == 0 ? cols : static_cast<std::size_t>(format.group);
  const auto scale_bytes = static_cast<std::size_t>(size_of(format.scale_dtype).n);
  const auto most = static_cast<float>(largest_code(format.codes));
  std::vector<std::int8_t> codes(cols);
  std::fill_n(panel.begin(), static_cast<std::size_t>(map.scales), std::byte{0});
  for (std::size_t row = 0; row < kPackedRows; ++row) {
    const std::span<const float> weights = rows.subspan(row * cols, cols);
    for (std::size_t first = 0; first < cols; first += width) {
      const std::span<const float> group = weights.subspan(first, std::min(width, cols - first));
      const StoredScale scale = stored_scale(magnitude_of(group) / most, format.scale_dtype);
      round_group(group, scale.value, most, codes.data() + first);
      std::copy_n(scale.bytes.begin(), scale_bytes,
                  panel.data() + static_cast<std::size_t>(map.scales) +
                      (first / width * kPackedRows + row) * scale_bytes);
    }
    if (format.codes == Codes::int4) {
      for (std::size_t k = 0; k < cols; ++k) {
        const auto code = static_cast<std::byte>(codes[k] + 8);
        panel[k / 2 * kPackedRows + row] |= k % 2 == 0 ? code : code << 4;
      }
    } else {
      for (std::size_t k = 0; k < cols; ++k) {
        panel[k * kPackedRows + row] = static_cast<std::byte>(codes[k]);
      }
    }
  }
}

PackingSource::PackingSource(std::unique_ptr<WeightSource> plain, std::vector<WeightTensor> tensors,
                             const PackedFormat& format, DType dtype)
    : plain_(std::move(plain)), tensors_(std::move(tensors)), format_(format), dtype_(dtype) {
  check(tensors_.size() == plain_->tensors().size(), "both sources have the same tensors");
}

void PackingSource::fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const {
  const WeightTensor& wanted = tensors_[tensor];
  if (!wanted.packed) {
    plain_->fill(tensor, first, out);
    return;
  }
  const auto panel = static_cast<std::size_t>(wanted.unit.n);
  const std::int64_t elements = wanted.elements / wanted.units;  // of a panel
  const std::size_t plain = static_cast<std::size_t>(elements * size_of(dtype_).n);
  thread_local std::vector<std::byte> stored;
  stored.resize(out.size() / panel * plain);
  plain_->fill(tensor, first * elements, stored);
  if (format_.codes != Codes::bfloat12) {
    round(stored, out, panel);
    return;
  }
  for (std::size_t from = 0, to = 0; to < out.size(); from += plain, to += panel) {
    if (!pack_bfloat12(std::span(stored).subspan(from, plain), out.subspan(to, panel))) {
      fail(Exit::unpackable,
           "tensor {} cannot be packed without loss: too many of its weights are far from their "
           "neighbours' size",
           wanted.name);
    }
  }
}

void PackingSource::round(std::span<const std::byte> plain, std::span<std::byte> panels,
                          std::size_t panel) const {
  thread_local std::vector<float> weights;
  weights.resize(plain.size() / static_cast<std::size_t>(size_of(dtype_).n));
  convert(dtype_, plain, DType::float32, std::as_writable_bytes(std::span(weights)));
  const std::size_t elements = weights.size() / (panels.size() / panel);
  for (std::size_t from = 0, to = 0; to < panels.size(); from += elements, to += panel) {
    round_panel(format_, std::span<const float>(weights).subspan(from, elements),
                panels.subspan(to, panel));
  }
}

}  // namespace poise
