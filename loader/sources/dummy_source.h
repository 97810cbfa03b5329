#pragma once
// Weights for runs that only need a model's shape (`--load-format dummy`): seeded random numbers,
// scaled so that activations and logits stay in the range of a real model through any number of
// layers. An element is a function of seed, tensor and index alone: the same on every machine, with
// any number of threads, and, except for rounding, in every dtype.
//
// Matrices: bell-shaped, standard deviation 0.02, those that write to the residual stream (W_O,
// fc2) 0.02 / sqrt(2 · layers), as GPT-2 starts. Biases: 0.01. Norms: weight 1, bias 0.01.
//
// Packed matrices, of a config that says its checkpoint is quantised: random codes, about equally likely
// (of float8 those from 1 to 1.875, with a sign), one scale that gives the same standard deviation, zero
// points that change nothing, and neighbouring inputs in a group. (`--quantization` packs plain dummies
// instead: packing_source.h.)

#include <vector>

#include "common/families/family.h"
#include "loader/sources/weight_source.h"

namespace poise {

class DummySource final : public WeightSource {
 public:
  // `packed`: of the layout's packed matrices.
  DummySource(const Family& family, const WeightLayout& layout, DType dtype, std::uint64_t seed,
              const PackedFormat& packed = {});

  const std::vector<WeightTensor>& tensors() const override { return tensors_; }
  void fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const override;
  void check_after(std::span<const std::byte>) const override {}

 private:
  void fill_panel(std::size_t tensor, std::int64_t number, std::span<std::byte> panel) const;

  std::vector<WeightTensor> tensors_;
  std::vector<float> deviation_;     // of each tensor; 0: all ones
  std::vector<std::int32_t> inputs_;  // of its matrix, where it is packed or a table of groups
  PackedFormat packed_;
  DType dtype_;
  std::uint64_t seed_;
};

// Elements `first` … `first + out.size()` of the stream that `seed` and `stream` name: independent,
// bell-shaped (a sum of four uniform numbers), mean 0, the given standard deviation.
void fill_bell_shaped(std::uint64_t seed, std::uint64_t stream, std::int64_t first, float deviation,
                      std::span<float> out);

}  // namespace poise
