#pragma once
// Where a model's weights come from: the checkpoint's files (checkpoint_source.h) or a seeded
// generator (dummy_source.h). A source knows the list of tensors that make up the weight segment,
// in the order of their bytes there, and can write any part of any of them, from any thread, in any
// order, always with the same bytes.

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "common/dtype.h"
#include "common/units.h"
#include "common/weight_layout.h"

namespace poise {

// A tensor's place in the weight segment. W_K and W_V are two tensors of one weight; a fused tensor
// of a checkpoint is in the list once for each weight that takes some of its outputs, and a packed one
// once more for the table of its inputs' groups, where there is one.
struct WeightTensor {
  Weight weight;
  std::uint32_t slab;               // 0: outer, 1 + l: layer l
  std::string name;                 // as the checkpoint has it
  std::vector<std::int64_t> shape;  // there
  std::int64_t first_output;        // of those there, the first that is taken
  bool inputs_first;                // a matrix of (in, out); the segment has (out, in)
  std::uint64_t offset;             // bytes from the segment's start
  std::int64_t elements;            // taken
  // What is filled at a time: an element, or a panel of 16 rows of a packed matrix.
  Bytes unit;
  std::int64_t units;
  bool packed;
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual const std::vector<WeightTensor>& tensors() const = 0;
  // Writes units `first` and following of tensor number `tensor`, as they are kept.
  virtual void fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const = 0;
  // Called once, after every tensor was filled into `segment`; fails if the source turns out to be
  // wrong.
  virtual void check_after(std::span<const std::byte> segment) const = 0;
};

}  // namespace poise
