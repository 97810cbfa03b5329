#pragma once
// A small random model in host memory, laid out as the loader lays out the weights segment, and what
// it computes by straight loops: no blocks, no batches, no device. The oracle of the pipeline.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <optional>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "common/dtype.h"
#include "common/families/rotary.h"
#include "common/model_shape.h"
#include "common/weight_layout.h"
#include "tests/kernels/kv_reference.h"
#include "tests/support/packed_numbers.h"

namespace poise::test {

inline ModelShape tiny_shape() {
  return {.num_hidden_layers = 3,
          .hidden_size = 24,
          .ffn_dim = 40,
          .num_attention_heads = 3,
          .num_key_value_heads = 3,
          .head_dim = 8,
          .vocab_size = 37,
          .max_position_embeddings = 128,
          .position_offset = 2,
          .word_embed_proj_dim = 24,
          .activation_function = Activation::relu,
          .norm_epsilon = 1e-5f,
          .do_layer_norm_before = 1,
          .qkv_bias = 1,
          .output_bias = 1,
          .mlp_bias = 1,
          .layer_norm_elementwise_affine = 1,
          .has_final_layer_norm = 1,
          .tie_word_embeddings = 1,
          .learned_positions = 1};
}

// OPT-350m's ways: norms behind, projected embeddings, no final norm.
inline ModelShape post_norm_shape() {
  ModelShape shape = tiny_shape();
  shape.do_layer_norm_before = 0;
  shape.has_final_layer_norm = 0;
  shape.word_embed_proj_dim = 12;
  shape.activation_function = Activation::gelu;
  return shape;
}

// Qwen3's and Mistral's ways together: RMSNorm, a gate, two query heads that share a key, heads wider
// than hidden_size / heads, normed and rotated by one of two sets of frequencies, a window on one layer.
inline ModelShape rotary_shape() {
  ModelShape shape = tiny_shape();
  shape.num_attention_heads = 4;
  shape.num_key_value_heads = 2;
  shape.qkv_bias = shape.output_bias = shape.mlp_bias = 0;
  shape.tie_word_embeddings = 0;
  shape.learned_positions = 0;
  shape.position_offset = 0;
  shape.norm = Norm::rms;
  shape.qk_norm = 1;
  shape.gated_mlp = 1;
  shape.activation_function = Activation::silu;
  shape.sliding_window = 9;
  shape.set_window({1});
  shape.rotary = {.kind = RotaryKind::longrope,
                  .dim = 8,
                  .theta = 100,
                  .original_max_position_embeddings = 24,
                  .scale = 1.125F};
  for (int i = 0; i < 4; ++i) {
    shape.rotary.short_factor[i] = 1.0F + 0.125F * static_cast<float>(i);
    shape.rotary.long_factor[i] = 1.5F + 0.5F * static_cast<float>(i);
  }
  return shape;
}

// Every layer has the window.
inline ModelShape windowed_shape() {
  ModelShape shape = rotary_shape();
  for (std::uint32_t layer = 0; layer < 3; ++layer) {
    shape.set_window({layer});
  }
  return shape;
}

// As rotary_shape, with matrices of 4 bits, zero points, and groups that are not of neighbours.
inline ModelShape packed_shape() {
  ModelShape shape = rotary_shape();
  shape.hidden_size = shape.word_embed_proj_dim = 32;
  shape.ffn_dim = 48;
  shape.packed = {.codes = Codes::int4,
                  .scale_dtype = DType::float16,
                  .group = 16,
                  .zero_points = 1,
                  .input_groups = 1};
  shape.packed_weights = packable_weights(shape);
  return shape;
}

// The same with weights packed without loss; for models of bfloat16.
inline ModelShape bfloat12_shape() {
  ModelShape shape = packed_shape();
  shape.packed = kBfloat12;
  return shape;
}

inline void write_number(std::byte* to, DType dtype, float value) {
  if (dtype == DType::float32) {
    std::memcpy(to, &value, sizeof value);
    return;
  }
  const std::uint16_t bits =
      dtype == DType::float16 ? to_half(value).bits : to_bfloat16(value).bits;
  std::memcpy(to, &bits, sizeof bits);
}

inline float rounded(float value, DType dtype) {
  std::byte bytes[4];
  write_number(bytes, dtype, value);
  return stored_number(bytes, dtype);
}

class TinyModel {
 public:
  TinyModel(const ModelShape& model_shape, DType model_dtype, std::uint32_t seed,
            Bytes piece_bytes = kWeightPieceBytes)
      : shape(model_shape),
        dtype(model_dtype),
        layout(weight_layout(model_shape, model_dtype, piece_bytes)) {
    bytes.resize(static_cast<std::size_t>(layout.total().n));
    std::mt19937 random(seed);
    fill(layout.outer, 0, random);
    for (std::int32_t layer = 0; layer < layout.layers; ++layer) {
      fill(layout.layer, layout.layer_offset({static_cast<std::uint32_t>(layer)}), random);
    }
  }

  // A weight as numbers, row-major; empty where the model has none. Layer -1: the outer slab.
  std::vector<float> weight(std::int32_t layer, Weight which) const {
    const Slab& slab = layer < 0 ? layout.outer : layout.layer;
    const WeightEntry* entry = slab.find(which);
    if (entry == nullptr) {
      return {};
    }
    const std::uint64_t start =
        (layer < 0 ? 0 : layout.layer_offset({static_cast<std::uint32_t>(layer)})) + entry->offset;
    if (entry->packed) {
      return unpacked_numbers(shape.packed, dtype, entry->rows, entry->cols, bytes.data() + start,
                              groups_in(slab, start - entry->offset, which));
    }
    std::vector<float> values;
    for (std::int64_t i = 0; i < entry->bytes.n; i += size_of(dtype).n) {
      values.push_back(stored_number(bytes.data() + start + i, dtype));
    }
    return values;
  }

  ModelShape shape;
  DType dtype;
  WeightLayout layout;
  std::vector<std::byte> bytes;

 private:
  std::vector<std::uint16_t> groups_in(const Slab& slab, std::uint64_t start, Weight matrix) const {
    const WeightEntry* entry = slab.find(groups_of(matrix));
    std::vector<std::uint16_t> groups;
    if (entry != nullptr) {
      groups.resize(static_cast<std::size_t>(entry->cols));
      std::memcpy(groups.data(), bytes.data() + start + entry->offset, groups.size() * 2);
    }
    return groups;
  }

  // Whether the entry is a packed matrix, or a table of its inputs' groups, and filled now.
  bool fill_packed(const WeightEntry& entry, std::byte* at, std::mt19937& random) {
    if (entry.packed) {
      fill_with_panels(shape.packed, entry.cols, 0.06F, random,
                       {at, static_cast<std::size_t>(entry.bytes.n)});
      return true;
    }
    for (const Weight matrix : kLayerMatrices) {
      if (entry.weight == groups_of(matrix)) {
        const std::int32_t parts = parts_of(shape, matrix);
        const auto groups = some_input_groups(shape.packed, parts, entry.cols / parts, random);
        std::memcpy(at, groups.data(), groups.size() * 2);
        return true;
      }
    }
    return false;
  }

  void fill(const Slab& slab, std::uint64_t start, std::mt19937& random) {
    for (const WeightEntry& entry : slab.entries) {
      if (fill_packed(entry, bytes.data() + start + entry.offset, random)) {
        continue;
      }
      const bool gain = entry.weight == Weight::attention_norm_weight ||
                        entry.weight == Weight::mlp_norm_weight ||
                        entry.weight == Weight::final_norm_weight ||
                        entry.weight == Weight::k_norm || entry.weight == Weight::q_norm;
      std::normal_distribution<float> values(gain ? 1.0f : 0.0f, entry.matrix() ? 0.25f : 0.1f);
      for (std::int64_t i = 0; i < entry.bytes.n; i += size_of(dtype).n) {
        write_number(bytes.data() + start + entry.offset + i, dtype, values(random));
      }
    }
  }
};

// Logits of every position of one sequence, (tokens, vocab_size), in double. Its first `prompt` tokens
// are its prompt.
class PlainForward {
 public:
  explicit PlainForward(const TinyModel& model, KvFormat kv_format = KvFormat::plain)
      : model_(model),
        shape_(model.shape),
        kv_format_(kv_format),
        frequencies_(rotary_frequencies(model.shape)) {}

  std::vector<std::vector<double>> logits(std::span<const std::int32_t> tokens,
                                          std::int32_t prompt = 20) {
    prompt_ = std::min(prompt, static_cast<std::int32_t>(tokens.size()));
    Hidden hidden = embed(tokens);
    for (std::int32_t layer = 0; layer < shape_.num_hidden_layers; ++layer) {
      decoder_layer(layer, hidden);
    }
    for (Row& row : hidden) {
      if (shape_.has_final_layer_norm != 0) {
        row = norm(row, -1, Weight::final_norm_weight, Weight::final_norm_bias);
      }
      if (shape_.projects_embeddings()) {
        row = times(row, -1, Weight::project_out, std::nullopt);
      }
      row = times(row, -1, shape_.tie_word_embeddings != 0 ? Weight::token_embedding : Weight::head,
                  std::nullopt);
    }
    return hidden;
  }

 private:
  using Row = std::vector<double>;
  using Hidden = std::vector<Row>;

  // Read from the model once, and not for each token.
  const Row& weights(std::int32_t layer, Weight weight) const {
    const auto [place, fresh] = weights_.try_emplace({layer, weight});
    if (fresh) {
      const std::vector<float> stored = model_.weight(layer, weight);
      place->second.assign(stored.begin(), stored.end());
    }
    return place->second;
  }

  Row times(const Row& in, std::int32_t layer, Weight weight, std::optional<Weight> bias) const {
    const Row& matrix = weights(layer, weight);
    const Row added = bias ? weights(layer, *bias) : Row();
    Row out(matrix.size() / in.size());
    for (std::size_t n = 0; n < out.size(); ++n) {
      const double* const row = matrix.data() + n * in.size();
      double total = 0;
      for (std::size_t k = 0; k < in.size(); ++k) {
        total += in[k] * row[k];
      }
      out[n] = total + (added.empty() ? 0.0 : added[n]);
    }
    return out;
  }

  Row norm(const Row& in, std::int32_t layer, Weight weight, Weight bias) const {
    const Row& gain = weights(layer, weight);
    const Row& shift = weights(layer, bias);
    double mean = 0, variance = 0;
    for (const double x : in) {
      mean += shape_.norm == Norm::rms ? 0 : x / static_cast<double>(in.size());
    }
    for (const double x : in) {
      variance += (x - mean) * (x - mean) / static_cast<double>(in.size());
    }
    Row out;
    for (std::size_t i = 0; i < in.size(); ++i) {
      const double x = (in[i] - mean) / std::sqrt(variance + shape_.norm_epsilon);
      out.push_back(x * (gain.empty() ? 1.0 : gain[i]) + (shift.empty() ? 0.0 : shift[i]));
    }
    return out;
  }

  // What is stored is rounded first.
  Row stored(Row row) const {
    for (double& x : row) {
      x = static_cast<double>(rounded(static_cast<float>(x), model_.dtype));
    }
    return row;
  }

  // Keys and values of a token as its KV block keeps them.
  Row kept(const Row& kv) const {
    if (kv_format_ == KvFormat::plain) {
      return kv;
    }
    const KvShape shape{shape_.num_key_value_heads, shape_.head_dim, model_.dtype, kv_format_};
    const Stored numbers = numbers_of(
        quantized_row(Stored(model_.dtype, std::vector<float>(kv.begin(), kv.end())), 0, shape)
            .data(),
        shape);
    Row row;
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      row.push_back(static_cast<double>(numbers[i]));
    }
    return row;
  }

  static Row sum(const Row& a, const Row& b) {
    Row out;
    for (std::size_t i = 0; i < a.size(); ++i) {
      out.push_back(a[i] + b[i]);
    }
    return out;
  }

  Hidden embed(std::span<const std::int32_t> tokens) const {
    const Row& table = weights(-1, Weight::token_embedding);
    const Row& positions = weights(-1, Weight::position_embedding);
    const auto width = static_cast<std::size_t>(shape_.word_embed_proj_dim);
    const auto h = static_cast<std::size_t>(shape_.hidden_size);
    Hidden hidden;
    for (std::size_t t = 0; t < tokens.size(); ++t) {
      const double* start = table.data() + static_cast<std::size_t>(tokens[t]) * width;
      Row row(start, start + width);
      if (shape_.projects_embeddings()) {
        row = times(row, -1, Weight::project_in, std::nullopt);
      }
      for (std::size_t i = 0; i < h && !positions.empty(); ++i) {
        row[i] += positions[(t + static_cast<std::size_t>(shape_.position_offset)) * h + i];
      }
      hidden.push_back(row);
    }
    return hidden;
  }

  void decoder_layer(std::int32_t layer, Hidden& hidden) const {
    const bool before = shape_.do_layer_norm_before != 0;
    Hidden q, kv;
    for (const Row& row : hidden) {
      const Row act = stored(
          before ? norm(row, layer, Weight::attention_norm_weight, Weight::attention_norm_bias)
                 : row);
      Row queries = times(act, layer, Weight::w_q, Weight::b_q);
      Row keys = stored(times(act, layer, Weight::w_kv, Weight::b_kv));
      if (shape_.turns_heads()) {
        turn(queries, shape_.num_attention_heads, layer, Weight::q_norm, q.size());
        turn(keys, shape_.num_key_value_heads, layer, Weight::k_norm, q.size());
      }
      q.push_back(queries);
      kv.push_back(kept(stored(keys)));
    }
    for (std::size_t t = 0; t < hidden.size(); ++t) {
      hidden[t] =
          sum(hidden[t], times(attend(q[t], kv, t, layer), layer, Weight::w_o, Weight::b_o));
      if (!before) {
        hidden[t] =
            norm(hidden[t], layer, Weight::attention_norm_weight, Weight::attention_norm_bias);
      }
      const Row in = before ? norm(hidden[t], layer, Weight::mlp_norm_weight, Weight::mlp_norm_bias)
                            : hidden[t];
      Row middle = times(in, layer, Weight::fc1, Weight::fc1_bias);
      const std::size_t ffn = static_cast<std::size_t>(shape_.ffn_dim);
      for (std::size_t i = 0; i < ffn; ++i) {
        middle[i] = activated(middle[i]) * (shape_.gated_mlp != 0 ? middle[ffn + i] : 1.0);
      }
      middle.resize(ffn);
      hidden[t] = sum(hidden[t], times(middle, layer, Weight::fc2, Weight::fc2_bias));
      if (!before) {
        hidden[t] = norm(hidden[t], layer, Weight::mlp_norm_weight, Weight::mlp_norm_bias);
      }
    }
  }

  double activated(double x) const {
    switch (shape_.activation_function) {
      case Activation::relu:
        return std::max(x, 0.0);
      case Activation::gelu:
        return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
      case Activation::gelu_tanh:
        return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
      case Activation::silu:
        return x / (1 + std::exp(-x));
    }
    return x;
  }

  // Norms and rotates the first `heads` heads of a row at a position.
  void turn(Row& row, std::int32_t heads, std::int32_t layer, Weight weight,
            std::size_t position) const {
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const std::size_t pairs = static_cast<std::size_t>(rotary_pairs(shape_));
    const Row& gain = weights(layer, weight);
    const auto at = static_cast<std::int32_t>(position);
    const auto set = static_cast<std::size_t>(frequency_set(shape_, at, prompt_));
    for (std::size_t head = 0; head < static_cast<std::size_t>(heads); ++head) {
      double* x = row.data() + head * dim;
      double squares = 0;
      for (std::size_t i = 0; i < dim; ++i) {
        squares += x[i] * x[i] / static_cast<double>(dim);
      }
      for (std::size_t i = 0; i < dim && !gain.empty(); ++i) {
        x[i] *= gain[i] / std::sqrt(squares + shape_.norm_epsilon);
      }
      for (std::size_t i = 0; i < pairs; ++i) {
        const double angle =
            static_cast<double>(at) * static_cast<double>(frequencies_[set * pairs + i]);
        const double c = std::cos(angle) * static_cast<double>(shape_.rotary.scale);
        const double s = std::sin(angle) * static_cast<double>(shape_.rotary.scale);
        const double a = x[i], b = x[i + pairs];
        x[i] = a * c - b * s;
        x[i + pairs] = b * c + a * s;
      }
    }
  }

  Row attend(const Row& q, const Hidden& kv, std::size_t position, std::int32_t layer) const {
    const auto window =
        static_cast<std::size_t>(shape_.window({static_cast<std::uint32_t>(layer)}));
    const std::size_t first = window > 0 && position >= window ? position - window + 1 : 0;
    const auto dim = static_cast<std::size_t>(shape_.head_dim);
    const auto group =
        static_cast<std::size_t>(shape_.num_attention_heads / shape_.num_key_value_heads);
    const auto values = static_cast<std::size_t>(shape_.kv_dim());  // where V starts in a row
    Row out(q.size());
    for (std::size_t head = 0; head < static_cast<std::size_t>(shape_.num_attention_heads);
         ++head) {
      const std::size_t kv_head = head / group;
      Row scores(position + 1, -1e30);
      for (std::size_t t = first; t <= position; ++t) {
        scores[t] = 0;
        for (std::size_t i = 0; i < dim; ++i) {
          scores[t] += q[head * dim + i] * kv[t][kv_head * dim + i];
        }
        scores[t] /= std::sqrt(static_cast<double>(dim));
      }
      const double maximum = *std::ranges::max_element(scores);
      double total = 0;
      for (double& score : scores) {
        score = std::exp(score - maximum);
        total += score;
      }
      for (std::size_t t = 0; t <= position; ++t) {
        for (std::size_t i = 0; i < dim; ++i) {
          out[head * dim + i] += scores[t] / total * kv[t][values + kv_head * dim + i];
        }
      }
    }
    return out;
  }

  const TinyModel& model_;
  const ModelShape& shape_;
  const KvFormat kv_format_;
  const std::vector<float> frequencies_;
  mutable std::map<std::pair<std::int32_t, Weight>, Row> weights_;  // by layer
  std::int32_t prompt_ = 0;
};

}  // namespace poise::test
