#pragma once
// Weights that are packed as they are loaded (`--quantization int8`, `int4`, `--pack-weights auto`): those of a
// plain source, a checkpoint or dummies, made codes by the rules in common/formats/. What is rounded or packed
// without loss are the numbers that the plain source gives, in the type that a plain run would keep. Where a
// panel of bfloat12 has more escapes than room, `fill` fails (Exit::unpackable).

#include <memory>
#include <vector>

#include "common/formats/packed_weights.h"
#include "loader/sources/weight_source.h"

namespace poise {

class PackingSource final : public WeightSource {
 public:
  // `tensors`: of the packed layout, in the order of the plain source's.
  PackingSource(std::unique_ptr<WeightSource> plain, std::vector<WeightTensor> tensors,
                const PackedFormat& format, DType dtype);

  const std::vector<WeightTensor>& tensors() const override { return tensors_; }
  void fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const override;
  void check_after(std::span<const std::byte> segment) const override {
    plain_->check_after(segment);
  }

 private:
  void round(std::span<const std::byte> plain, std::span<std::byte> panels,
             std::size_t panel) const;

  std::unique_ptr<WeightSource> plain_;
  std::vector<WeightTensor> tensors_;
  PackedFormat format_;
  DType dtype_;
};

// One panel of codes from 16 rows of `cols` numbers.
void round_panel(const PackedFormat& format, std::span<const float> rows,
                 std::span<std::byte> panel);

}  // namespace poise
