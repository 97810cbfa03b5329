#pragma once
// Where each weight lies in the weight segment. The loader fills the segment, the executor reads it,
// the planner counts its bytes. The layout is a pure function of model shape and dtype, so every
// process computes the same one. Its hash covers shape and dtype too and is in the control segment:
// the executor refuses a segment laid out for another model.
//
//   | slab 0: outer (embeddings, projections, final norm, head) | slab 1: layer 0 | slab 2: layer 1
//   | …
//
// A slab is contiguous and page-aligned. Its weights lie in the order of the copies and are grouped
// into pieces, the units of streaming. A decoder layer's first pieces are what KV regeneration needs
// (W_K W_V b_K b_V, the norm of K) and the attention norm, which the keys and values of new rows need as well. So both
// start before the rest has arrived (KVPR section 3.3, fine-grained pipeline). A large matrix crosses the
// link in several pieces, so that a mini-batch's blocks never wait long behind weights. Matrices are
// stored as in most checkpoints, (out, in) row-major, in `dtype`; W_K and W_V are one matrix of 2·kv_dim
// rows. So are W_gate and W_up: one product gives both, and a second launch makes the gated rows from them.
// Matrices that the shape says are packed lie as panels of 16 rows (common/formats/packed_weights.h). Weights that
// the model does not have (biases, for example) have no entry.

#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/model_shape.h"
#include "common/units.h"

namespace poise {

enum class Weight : std::uint8_t {
  // outer slab
  token_embedding,     // (vocab_size, word_embed_proj_dim); also the head when tied
  position_embedding,  // (max_position_embeddings + position_offset, hidden_size)
  project_in,          // (hidden_size, word_embed_proj_dim)
  project_out,         // (word_embed_proj_dim, hidden_size)
  final_norm_weight,   // (hidden_size)
  final_norm_bias,     // (hidden_size)
  head,                // (vocab_size, word_embed_proj_dim), untied models only
  // layer slabs
  w_kv,                   // (2 · kv_dim, hidden_size): W_K above W_V
  b_kv,                   // (2 · kv_dim)
  attention_norm_weight,  // (hidden_size)
  attention_norm_bias,    // (hidden_size)
  k_norm,                 // (head_dim), models that norm the heads of q and k
  w_q,                    // (q_dim, hidden_size)
  b_q,                    // (q_dim)
  q_norm,                 // (head_dim)
  w_o,                    // (hidden_size, q_dim)
  b_o,                    // (hidden_size)
  mlp_norm_weight,        // (hidden_size)
  mlp_norm_bias,          // (hidden_size)
  fc1,                    // (fc1_dim, hidden_size): in gated models W_gate above W_up
  fc1_bias,               // (fc1_dim)
  fc2,                    // (hidden_size, ffn_dim)
  fc2_bias,               // (hidden_size)
  // The group of each input, uint16, of packed matrices whose groups are not of neighbours. Tensors that
  // are one matrix here have a row each.
  w_kv_groups,  // (2, hidden_size)
  w_q_groups,   // (1, hidden_size)
  w_o_groups,   // (1, q_dim)
  fc1_groups,   // (1, or 2 in gated models; hidden_size)
  fc2_groups,   // (1, ffn_dim)
};
inline constexpr int kWeights = static_cast<int>(Weight::fc2_groups) + 1;
// The matrices of a layer: those that may be packed.
inline constexpr Weight kLayerMatrices[] = {Weight::w_kv, Weight::w_q, Weight::w_o, Weight::fc1,
                                            Weight::fc2};
constexpr std::uint32_t bit_of(Weight weight) { return 1U << static_cast<int>(weight); }
// Of such a matrix: the weight that holds its inputs' groups.
Weight groups_of(Weight matrix);
// Tensors that are one above the other in a matrix of the layers: W_K and W_V, W_gate and W_up.
std::int32_t parts_of(const ModelShape& shape, Weight matrix);
// Those of kLayerMatrices whose tensors have whole panels of rows.
std::uint32_t packable_weights(const ModelShape& shape);

std::string_view name_of(Weight weight);

// Whether it is a bias, a norm's parameters or a table of groups. All others are matrices, even with
// one row.
bool is_vector(Weight weight);

// One weight's place within its slab.
struct WeightEntry {
  Weight weight;
  std::int32_t piece;       // where it begins
  std::int32_t last_piece;  // where it ends; only matrices lie in more than one
  std::int32_t rows;        // vectors have one row, and so may matrices
  std::int32_t cols;
  std::uint64_t offset;  // bytes from the slab's start, a multiple of 256
  Bytes bytes;           // rows · cols · size_of(dtype), or of the panels; without padding
  bool packed;
  bool matrix() const { return !is_vector(weight); }
};

// A contiguous range of a slab that crosses the link in one copy. A cut within a matrix is at a
// multiple of 16 rows.
struct WeightPiece {
  std::uint64_t offset;  // bytes from the slab's start
  Bytes bytes;
};

struct Slab {
  Bytes bytes;  // a multiple of 4096
  std::vector<WeightEntry> entries;
  std::vector<WeightPiece> pieces;

  const WeightEntry* find(Weight weight) const;  // nullptr: this model has none
};

struct WeightLayout {
  Slab outer;
  Slab layer;  // every decoder layer has the same map
  std::int32_t layers;
  std::uint64_t model_hash;  // of the whole shape and the dtype

  std::uint64_t layer_offset(LayerId layer_id) const {  // bytes from the segment's start
    return static_cast<std::uint64_t>(outer.bytes.n) +
           layer_id.n * static_cast<std::uint64_t>(layer.bytes.n);
  }
  Bytes total() const { return outer.bytes + layer.bytes * layers; }
  std::uint64_t hash() const;  // changes with any offset, size or order, and with the model
};

// Size of a layer's pieces; larger if the layer would have more than kMaxWeightPieces otherwise. At
// 22 GB/s a piece takes 1.5 ms, and its copy runs at the link's full speed.
inline constexpr Bytes kWeightPieceBytes = kMiB * 32;
inline constexpr std::int32_t kMaxWeightPieces = 63;

WeightLayout weight_layout(const ModelShape& shape, DType dtype,
                           Bytes piece_bytes = kWeightPieceBytes);

}  // namespace poise
