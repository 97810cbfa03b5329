#include "gpu_executor/device_weight_map.h"

#include <algorithm>
#include <vector>

#include "common/trouble.h"

namespace poise {
namespace {

// Finds weights of one slab where they were placed on the device.
class Placed {
 public:
  Placed(const ModelShape& shape, const Slab& slab, const DeviceSlab& placed, DType dtype,
         std::byte* data)
      : shape_(shape), slab_(slab), placed_(placed), dtype_(dtype), data_(data) {}

  const void* vector(Weight weight) const {
    const WeightEntry* entry = slab_.find(weight);
    return entry == nullptr ? nullptr : data_ + placed_.offsets[index(entry)];
  }
  Matrix matrix(Weight weight) const {
    const WeightEntry* entry = slab_.find(weight);
    if (entry == nullptr) {
      return {};
    }
    Matrix found{.data = vector(weight), .rows = entry->rows, .cols = entry->cols, .dtype = dtype_};
    if (entry->packed) {
      found.packed = shape_.packed;
      found.parts = parts_of(shape_, weight);
      if (shape_.packed.input_groups != 0) {
        found.input_groups = static_cast<const std::uint16_t*>(vector(groups_of(weight)));
      }
    }
    return found;
  }

 private:
  std::size_t index(const WeightEntry* entry) const {
    return static_cast<std::size_t>(entry - slab_.entries.data());
  }

  const ModelShape& shape_;
  const Slab& slab_;
  const DeviceSlab& placed_;
  DType dtype_;
  std::byte* data_;
};

struct RowRange {
  std::int32_t first, end;
};
// The rows of a weight that lie in a piece.
RowRange rows_in(const WeightEntry& entry, const WeightPiece& piece) {
  const std::int64_t row = entry.bytes.n / entry.rows;
  const auto begin =
      static_cast<std::int64_t>(piece.offset) - static_cast<std::int64_t>(entry.offset);
  const auto row_at = [&](std::int64_t offset) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(offset / row, 0, entry.rows));
  };
  return {.first = row_at(std::max<std::int64_t>(begin, 0)), .end = row_at(begin + piece.bytes.n)};
}

}  // namespace

DeviceWeightMap::DeviceWeightMap(Device& device, const ModelShape& shape, DType dtype,
                                 const WeightLayout& layout, std::span<const std::byte> host)
    : device_(device),
      shape_(shape),
      dtype_(dtype),
      layout_(layout),
      placed_outer_(device_slab(layout.outer, dtype)),
      placed_layer_(device_slab(layout.layer, dtype)),
      host_(host) {
  check(static_cast<std::int64_t>(host.size()) >= layout.total().n,
        "the weights segment holds all weights");
}

OuterWeights DeviceWeightMap::outer_at(std::byte* data) const {
  const Placed outer(shape_, layout_.outer, placed_outer_, dtype_, data);
  return {.token_embedding = outer.matrix(Weight::token_embedding),
          .head = outer.matrix(shape_.tie_word_embeddings != 0 ? Weight::token_embedding
                                                               : Weight::head),
          .project_in = outer.matrix(Weight::project_in),
          .project_out = outer.matrix(Weight::project_out),
          .position_embedding = outer.vector(Weight::position_embedding),
          .final_norm_weight = outer.vector(Weight::final_norm_weight),
          .final_norm_bias = outer.vector(Weight::final_norm_bias)};
}

LayerWeights DeviceWeightMap::layer_at(std::byte* data) const {
  const Placed layer(shape_, layout_.layer, placed_layer_, dtype_, data);
  return {.w_kv = layer.matrix(Weight::w_kv),
          .w_q = layer.matrix(Weight::w_q),
          .w_o = layer.matrix(Weight::w_o),
          .fc1 = layer.matrix(Weight::fc1),
          .fc2 = layer.matrix(Weight::fc2),
          .b_kv = layer.vector(Weight::b_kv),
          .b_q = layer.vector(Weight::b_q),
          .b_o = layer.vector(Weight::b_o),
          .fc1_bias = layer.vector(Weight::fc1_bias),
          .fc2_bias = layer.vector(Weight::fc2_bias),
          .attention_norm_weight = layer.vector(Weight::attention_norm_weight),
          .attention_norm_bias = layer.vector(Weight::attention_norm_bias),
          .k_norm = layer.vector(Weight::k_norm),
          .q_norm = layer.vector(Weight::q_norm),
          .mlp_norm_weight = layer.vector(Weight::mlp_norm_weight),
          .mlp_norm_bias = layer.vector(Weight::mlp_norm_bias)};
}

LayerWeights DeviceWeightMap::unpacked(const LayerWeights& layer, std::byte* room) const {
  LayerWeights result = layer;
  for (const Weight weight : kLayerMatrices) {
    const Matrix& packed = layer.matrix(weight);
    if (packed.packed.is_packed()) {
      result.matrix(weight) = {
          .data = room, .rows = packed.rows, .cols = packed.cols, .dtype = packed.dtype};
      room += unpacked_bytes(packed.rows, packed.cols, packed.dtype).n;
    }
  }
  return result;
}

Bytes DeviceWeightMap::upload_outer(std::byte* to) const {
  return upload(layout_.outer, placed_outer_, 0, to, std::nullopt);
}

Bytes DeviceWeightMap::upload_layer(LayerId layer, std::byte* to,
                                    std::optional<std::int32_t> piece) const {
  return upload(layout_.layer, placed_layer_, layout_.layer_offset(layer), to, piece);
}

// The entries of one piece of a slab, or of all pieces; returns their bytes. `from`: of the slab, in
// the segment.
Bytes DeviceWeightMap::upload(const Slab& slab, const DeviceSlab& placed, std::uint64_t from,
                              std::byte* to, std::optional<std::int32_t> piece) const {
  std::vector<WeightCopy> copies;
  Bytes bytes{};
  for (std::size_t i = 0; i < slab.entries.size(); ++i) {
    const WeightEntry& entry = slab.entries[i];
    const RowRange rows = piece ? rows_in(entry, slab.pieces[static_cast<std::size_t>(*piece)])
                                : RowRange{.first = 0, .end = entry.rows};
    if (rows.end > rows.first) {  // panels are of whole rows in their order: both sides move alike
      const std::int64_t row = entry.bytes.n / entry.rows;
      const std::int64_t before = rows.first * row;
      copies.push_back({.to = to + placed.offsets[i] + before,
                        .from = host_.data() + from + entry.offset + before,
                        .rows = rows.end - rows.first,
                        .cols = entry.cols,
                        .dtype = dtype_,
                        .panelled = is_panelled(entry),
                        .plain_size = {is_panelled(entry) ? 0 : (rows.end - rows.first) * row}});
      bytes += copies.back().bytes();
    }
  }
  device_.upload(Stream::copy_in, copies);
  return bytes;
}

Matrix& LayerWeights::matrix(Weight weight) {
  switch (weight) {
    case Weight::w_kv:
      return w_kv;
    case Weight::w_q:
      return w_q;
    case Weight::w_o:
      return w_o;
    case Weight::fc1:
      return fc1;
    default:
      check(weight == Weight::fc2, "a layer has five matrices");
      return fc2;
  }
}

}  // namespace poise
