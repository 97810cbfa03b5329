#pragma once
// The model's weights as the device has them: the outer slab and the resident layers, uploaded once,
// and two buffers through which the streamed layers pass, piece by piece. Uploads run on copy_in;
// the compute stream waits for a piece when it needs it, and a buffer is overwritten only after the
// order that computed from it. Computation waits for some load behind the first uploads anyway, and
// so for them. Lives as long as a Configure; belongs to the pipeline.

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "common/device_memory.h"
#include "common/model_shape.h"
#include "common/weight_layout.h"
#include "gpu_executor/device.h"
#include "gpu_executor/layer_buffers.h"

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
  const void* mlp_norm_weight = nullptr;
  const void* mlp_norm_bias = nullptr;
};

class WeightsOnDevice {
 public:
  // `host`: the weights segment, laid out as `layout` says. Takes the memory …
  WeightsOnDevice(Device& device, const ModelShape& shape, DType dtype, const WeightLayout& layout,
                  std::span<const std::byte> host, const DeviceLimits& limits);

  // … and queues the uploads of what stays. Call once, before any other.
  void upload_residents();

  const OuterWeights& outer() const { return outer_; }

  // Queues a piece of a streamed layer on copy_in; returns its bytes. Fails as LayerBuffers does.
  // `begins` is called when the wait for room is queued and the copy is not.
  Bytes fetch(LayerId layer, std::uint32_t piece, const std::function<void()>& begins);

  // Between the two an order computes the layer; `need` makes the compute stream wait for the
  // pieces a weight is in, whose fetches must have been queued.
  const LayerWeights& begin(LayerId layer);
  void need(Weight weight);
  void end();

  void abandon() { ledger_.abandon(); }

 private:
  struct Streamed {
    Buffer memory;
    LayerWeights weights;
    std::vector<std::unique_ptr<Event>> arrived;  // by piece; recorded on copy_in
    std::unique_ptr<Event> computed;              // the last order that used it; on compute
  };

  Bytes upload(const Slab& slab, const DeviceSlab& placed, std::uint64_t from, std::byte* to,
               std::optional<std::int32_t> piece);
  LayerWeights layer_at(std::byte* data) const;

  Device& device_;
  DType dtype_;
  WeightLayout layout_;
  DeviceSlab placed_outer_, placed_layer_;
  std::span<const std::byte> host_;
  LayerBuffers ledger_;

  Buffer outer_memory_, resident_memory_;
  OuterWeights outer_;
  std::vector<LayerWeights> resident_;  // by layer; empty where streamed
  std::array<Streamed, 2> streamed_;

  std::optional<int> buffer_in_use_;  // between begin and end, where the layer is streamed
  std::uint64_t needed_ = 0;          // pieces waited for since begin
};

}  // namespace poise
