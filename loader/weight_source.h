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

// A tensor's place in the weight segment. W_K and W_V are two tensors of one weight.
struct WeightTensor {
  Weight weight;
  std::uint32_t slab;  // 0: outer, 1 + l: layer l
  std::string name;    // as the checkpoint has it
  std::vector<std::int64_t> shape;
  std::uint64_t offset;   // bytes from the segment's start
  std::int64_t elements;  // those of `shape`
};

class WeightSource {
 public:
  virtual ~WeightSource() = default;
  virtual const std::vector<WeightTensor>& tensors() const = 0;
  // Writes elements `first` and following of tensor number `tensor`, in the dtype they are kept in.
  virtual void fill(std::size_t tensor, std::int64_t first, std::span<std::byte> out) const = 0;
  // Called once, after every tensor was filled into `segment`; fails if the source turns out to be
  // wrong.
  virtual void check_after(std::span<const std::byte> segment) const = 0;
};

}  // namespace poise
