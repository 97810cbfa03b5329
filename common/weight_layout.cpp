#include "common/weight_layout.h"

#include <algorithm>
#include <array>
#include <bit>
#include <type_traits>
#include <utility>

#include "common/trouble.h"

namespace poise {
namespace {

constexpr std::int64_t kOffsetAlignment = 256;  // a weight's offset; for vector loads and cuBLASLt
constexpr std::int64_t kPage = 4096;  // a slab's offset; needed for registering and direct reads

constexpr std::int64_t kCutRows =
    16;  // a matrix is cut at multiples of it: whole panels on a CPU device
constexpr std::int64_t kFullPieces = 48;  // of a very large layer; the ends of its groups are more

// Places weights one after the other, groups them, and cuts the groups into pieces.
class SlabBuilder {
 public:
  SlabBuilder(const ModelShape& shape, DType dtype) : shape_(shape), element_(size_of(dtype)) {}

  void add(Weight weight, std::int32_t rows, std::int32_t cols, bool present = true) {
    const bool packed = (shape_.packed_weights & bit_of(weight)) != 0;
    if (packed && shape_.packed.input_groups != 0) {
      const Weight groups = groups_of(weight);
      const std::int32_t width = parts_of(shape_, weight) * cols;
      put(groups, 1, width, Bytes{2} * width, false);
    }
    if (present) {
      put(weight, rows, cols,
          packed ? packed_bytes(shape_.packed, rows, cols) : element_ * rows * cols, packed);
    }
  }

  // What follows begins another piece.
  void close_group() { ++group_; }

  Slab finish() {  // a piece for each group
    return finish({std::max<std::int64_t>(end_, 1)});
  }
  Slab finish(Bytes piece_bytes) {
    most_ = std::max(piece_bytes.n, ceil_div(end_, kFullPieces));
    std::int32_t group = -1;
    for (WeightEntry& entry : slab_.entries) {
      const auto offset = static_cast<std::int64_t>(entry.offset);
      if (std::exchange(group, entry.piece) != entry.piece) {
        begin_piece(offset);
      }
      entry.piece = place(entry, offset);
      entry.last_piece = piece();
    }
    begin_piece(end_);
    slab_.pieces.pop_back();
    check(std::ssize(slab_.pieces) <= kMaxWeightPieces, "a layer has few pieces");
    slab_.bytes = {round_up(end_, kPage)};
    return std::move(slab_);
  }

 private:
  void put(Weight weight, std::int32_t rows, std::int32_t cols, Bytes bytes, bool packed) {
    slab_.entries.push_back({.weight = weight,
                             .piece = group_,
                             .last_piece = group_,
                             .rows = rows,
                             .cols = cols,
                             .offset = static_cast<std::uint64_t>(end_),
                             .bytes = bytes,
                             .packed = packed});
    end_ = round_up(end_ + bytes.n, kOffsetAlignment);
  }
  // The piece where the entry begins. It goes to the open one as far as that has room for its rows.
  std::int32_t place(const WeightEntry& entry, std::int64_t offset) {
    const std::int64_t row = entry.bytes.n / entry.rows, end = offset + entry.bytes.n;
    std::int32_t first = piece();
    for (std::int64_t at = offset; entry.matrix() && end - piece_start_ > most_;) {
      const std::int64_t room = (most_ - (at - piece_start_)) / row / kCutRows * kCutRows;
      const std::int64_t rows = std::max(room, at > piece_start_ ? 0 : kCutRows);
      if (rows >= (end - at) / row) {
        break;
      }
      at += rows * row;
      begin_piece(at);
      first = at == offset ? piece() : first;
    }
    return first;
  }
  std::int32_t piece() const { return static_cast<std::int32_t>(slab_.pieces.size()) - 1; }
  void begin_piece(std::int64_t at) {
    if (!slab_.pieces.empty()) {
      slab_.pieces.back().bytes = {at - piece_start_};
    }
    slab_.pieces.push_back({.offset = static_cast<std::uint64_t>(at), .bytes = {}});
    piece_start_ = at;
  }

  const ModelShape& shape_;
  Bytes element_;
  Slab slab_;
  std::int64_t end_ = 0;
  std::int32_t group_ = 0;
  std::int64_t most_ = 0;         // bytes of a piece
  std::int64_t piece_start_ = 0;  // of the open one
};

Slab outer_slab(const ModelShape& shape, DType dtype) {
  const std::int32_t h = shape.hidden_size;
  const std::int32_t width = shape.word_embed_proj_dim;
  const bool affine = shape.has_final_layer_norm != 0 && shape.layer_norm_elementwise_affine != 0;
  SlabBuilder slab(shape, dtype);
  slab.add(Weight::token_embedding, shape.vocab_size, width);
  slab.add(Weight::position_embedding, shape.max_position_embeddings + shape.position_offset, h,
           shape.learned_positions != 0);
  slab.add(Weight::project_in, h, width, shape.projects_embeddings());
  slab.add(Weight::project_out, width, h, shape.projects_embeddings());
  slab.add(Weight::final_norm_weight, 1, h, affine);
  slab.add(Weight::final_norm_bias, 1, h, affine && shape.norm == Norm::layer_norm);
  slab.add(Weight::head, shape.vocab_size, width, shape.tie_word_embeddings == 0);
  slab.close_group();
  return slab.finish();
}

Slab layer_slab(const ModelShape& shape, DType dtype, Bytes piece_bytes) {
  const std::int32_t h = shape.hidden_size;
  const bool affine = shape.layer_norm_elementwise_affine != 0;
  const bool norm_bias = affine && shape.norm == Norm::layer_norm;
  const bool qk_norm = shape.qk_norm != 0;
  SlabBuilder slab(shape, dtype);
  slab.add(Weight::w_kv, 2 * shape.kv_dim(), h);
  slab.add(Weight::b_kv, 1, 2 * shape.kv_dim(), shape.qkv_bias != 0);
  slab.add(Weight::attention_norm_weight, 1, h, affine);
  slab.add(Weight::attention_norm_bias, 1, h, norm_bias);
  slab.add(Weight::k_norm, 1, shape.head_dim, qk_norm);
  slab.close_group();
  slab.add(Weight::w_q, shape.q_dim(), h);
  slab.add(Weight::b_q, 1, shape.q_dim(), shape.qkv_bias != 0);
  slab.add(Weight::q_norm, 1, shape.head_dim, qk_norm);
  slab.add(Weight::w_o, h, shape.q_dim());
  slab.add(Weight::b_o, 1, h, shape.output_bias != 0);
  slab.close_group();
  slab.add(Weight::mlp_norm_weight, 1, h, affine);
  slab.add(Weight::mlp_norm_bias, 1, h, norm_bias);
  slab.add(Weight::fc1, shape.fc1_dim(), h);
  slab.add(Weight::fc1_bias, 1, shape.fc1_dim(), shape.mlp_bias != 0);
  slab.close_group();
  slab.add(Weight::fc2, h, shape.ffn_dim);
  slab.add(Weight::fc2_bias, 1, h, shape.mlp_bias != 0);
  slab.close_group();
  return slab.finish(piece_bytes);
}

std::uint64_t mix(std::uint64_t hash, std::uint64_t value) {  // FNV-1a over the value's bytes
  for (int i = 0; i < 8; ++i) {
    hash = (hash ^ ((value >> (8 * i)) & 0xff)) * 0x100000001b3ull;
  }
  return hash;
}

std::uint64_t hash_of(const ModelShape& shape, DType dtype) {
  static_assert(std::is_trivially_copyable_v<ModelShape> && sizeof(ModelShape) % 4 == 0);
  using Words = std::array<std::uint32_t, sizeof(ModelShape) / 4>;  // no padding among them
  std::uint64_t hash = mix(0xcbf29ce484222325ull, static_cast<std::uint64_t>(dtype));
  for (const std::uint32_t word : std::bit_cast<Words>(shape)) {
    hash = mix(hash, word);
  }
  return hash;
}

std::uint64_t mix(std::uint64_t hash, const Slab& slab) {
  hash = mix(hash, static_cast<std::uint64_t>(slab.bytes.n));
  for (const WeightEntry& entry : slab.entries) {
    for (const std::uint64_t value :
         {static_cast<std::uint64_t>(entry.weight), static_cast<std::uint64_t>(entry.piece),
          static_cast<std::uint64_t>(entry.last_piece), static_cast<std::uint64_t>(entry.rows),
          static_cast<std::uint64_t>(entry.cols), entry.offset,
          static_cast<std::uint64_t>(entry.bytes.n)}) {
      hash = mix(hash, value);
    }
  }
  for (const WeightPiece& piece : slab.pieces) {
    hash = mix(mix(hash, piece.offset), static_cast<std::uint64_t>(piece.bytes.n));
  }
  return hash;
}

}  // namespace

std::string_view name_of(Weight weight) {
  static constexpr std::array<std::string_view, kWeights> names{"token_embedding",
                                                                "position_embedding",
                                                                "project_in",
                                                                "project_out",
                                                                "final_norm_weight",
                                                                "final_norm_bias",
                                                                "head",
                                                                "w_kv",
                                                                "b_kv",
                                                                "attention_norm_weight",
                                                                "attention_norm_bias",
                                                                "k_norm",
                                                                "w_q",
                                                                "b_q",
                                                                "q_norm",
                                                                "w_o",
                                                                "b_o",
                                                                "mlp_norm_weight",
                                                                "mlp_norm_bias",
                                                                "fc1",
                                                                "fc1_bias",
                                                                "fc2",
                                                                "fc2_bias",
                                                                "w_kv_groups",
                                                                "w_q_groups",
                                                                "w_o_groups",
                                                                "fc1_groups",
                                                                "fc2_groups"};
  return names[static_cast<std::size_t>(weight)];
}

bool is_vector(Weight weight) {
  switch (weight) {
    case Weight::final_norm_weight:
    case Weight::final_norm_bias:
    case Weight::b_kv:
    case Weight::attention_norm_weight:
    case Weight::attention_norm_bias:
    case Weight::k_norm:
    case Weight::b_q:
    case Weight::q_norm:
    case Weight::b_o:
    case Weight::mlp_norm_weight:
    case Weight::mlp_norm_bias:
    case Weight::fc1_bias:
    case Weight::fc2_bias:
    case Weight::w_kv_groups:
    case Weight::w_q_groups:
    case Weight::w_o_groups:
    case Weight::fc1_groups:
    case Weight::fc2_groups:
      return true;
    default:
      return false;
  }
}

Weight groups_of(Weight matrix) {
  switch (matrix) {
    case Weight::w_kv:
      return Weight::w_kv_groups;
    case Weight::w_q:
      return Weight::w_q_groups;
    case Weight::w_o:
      return Weight::w_o_groups;
    case Weight::fc1:
      return Weight::fc1_groups;
    default:
      check(matrix == Weight::fc2, "only a layer's matrices are packed");
      return Weight::fc2_groups;
  }
}

std::int32_t parts_of(const ModelShape& shape, Weight matrix) {
  return matrix == Weight::w_kv || (matrix == Weight::fc1 && shape.gated_mlp != 0) ? 2 : 1;
}

std::uint32_t packable_weights(const ModelShape& shape) {
  const auto if_whole = [](Weight weight, std::int32_t rows_of_a_part) {
    return rows_of_a_part % kPackedRows == 0 ? bit_of(weight) : 0U;
  };
  return if_whole(Weight::w_kv, shape.kv_dim()) | if_whole(Weight::w_q, shape.q_dim()) |
         if_whole(Weight::w_o, shape.hidden_size) | if_whole(Weight::fc1, shape.ffn_dim) |
         if_whole(Weight::fc2, shape.hidden_size);
}

const WeightEntry* Slab::find(Weight weight) const {
  const auto found = std::ranges::find(entries, weight, &WeightEntry::weight);
  return found == entries.end() ? nullptr : &*found;
}

std::uint64_t WeightLayout::hash() const {
  return mix(mix(mix(model_hash, outer), layer), static_cast<std::uint64_t>(layers));
}

WeightLayout weight_layout(const ModelShape& shape, DType dtype, Bytes piece_bytes) {
  check(shape.num_hidden_layers > 0 && shape.hidden_size > 0, "a model has layers and a width");
  return {.outer = outer_slab(shape, dtype),
          .layer = layer_slab(shape, dtype, piece_bytes),
          .layers = shape.num_hidden_layers,
          .model_hash = hash_of(shape, dtype)};
}

}  // namespace poise
