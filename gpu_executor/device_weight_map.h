#pragma once
// Where each weight lies in a slab on the device, and its upload from the weights segment, for resident
// and streamed weights alike. Holds no memory; the device and the segment must outlive it.

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "common/device_memory.h"
#include "common/model_shape.h"
#include "common/weight_layout.h"
#include "gpu_executor/device.h"

namespace poise {

struct OuterWeights {
  Matrix token_embedding;  // (vocab_size, word_embed_proj_dim)
  Matrix head;             // (vocab_size, word_embed_proj_dim); the embedding where tied
  Matrix project_in;       // (hidden_size, word_embed_proj_dim), models that project
  Matrix project_out;      // (word_embed_proj_dim, hidden_size)
  const void* position_embedding = nullptr;  // (max_position_embeddings + offset, hidden_size)
  const void* final_norm_weight = nullptr;   // (hidden_size), as below; null: the model has none
  const void* final_norm_bias = nullptr;
};

struct LayerWeights {
  Matrix w_kv, w_q, w_o, fc1, fc2;  // shapes: common/weight_layout.h
  const void* b_kv = nullptr;
  const void* b_q = nullptr;
  const void* b_o = nullptr;
  const void* fc1_bias = nullptr;
  const void* fc2_bias = nullptr;
  const void* attention_norm_weight = nullptr;
  const void* attention_norm_bias = nullptr;
  const void* k_norm = nullptr;  // (head_dim)
  const void* q_norm = nullptr;
  const void* mlp_norm_weight = nullptr;
  const void* mlp_norm_bias = nullptr;

  Matrix& matrix(Weight weight);  // REQUIRES: one of kLayerMatrices
  const Matrix& matrix(Weight weight) const {
    return const_cast<LayerWeights*>(this)->matrix(weight);
  }
};

class DeviceWeightMap {
 public:
  // `host`: the weights segment, laid out as `layout` says.
  DeviceWeightMap(Device& device, const ModelShape& shape, DType dtype, const WeightLayout& layout,
                  std::span<const std::byte> host);

  const WeightLayout& layout() const { return layout_; }
  // Bytes of a slab on the device.
  Bytes outer_bytes() const { return placed_outer_.bytes; }
  Bytes layer_bytes() const { return placed_layer_.bytes; }
  // The weights of a slab that lies at `data`.
  OuterWeights outer_at(std::byte* data) const;
  LayerWeights layer_at(std::byte* data) const;
  // A layer's weights with each packed matrix as a plain one in `room` (DeviceSizes::unpacked), where
  // Unpack has to make it.
  LayerWeights unpacked(const LayerWeights& layer, std::byte* room) const;
  // Queue a slab, or one piece of it, on copy_in; return its bytes.
  Bytes upload_outer(std::byte* to) const;
  Bytes upload_layer(LayerId layer, std::byte* to,
                     std::optional<std::int32_t> piece = std::nullopt) const;

 private:
  Bytes upload(const Slab& slab, const DeviceSlab& placed, std::uint64_t from, std::byte* to,
               std::optional<std::int32_t> piece) const;

  Device& device_;
  const ModelShape shape_;
  DType dtype_;
  WeightLayout layout_;
  DeviceSlab placed_outer_, placed_layer_;
  std::span<const std::byte> host_;
};

}  // namespace poise
