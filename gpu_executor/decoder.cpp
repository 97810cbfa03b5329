#include "gpu_executor/decoder.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/families/rotary.h"

namespace poise {
namespace {

float* floats(const Buffer& buffer) { return reinterpret_cast<float*>(buffer.data()); }

Rows float_rows(float* data, std::int64_t width) {
  return {.data = data, .dtype = DType::float32, .stride = width};
}

}  // namespace

Decoder::Decoder(Device& device, const ModelShape& shape, DType dtype, const DeviceLimits& limits)
    : device_(device),
      shape_(shape),
      dtype_(dtype),
      work_(device.work_type(dtype)),
      kv_format_(limits.kv_format),
      kv_row_(kv_row_layout(shape, dtype, limits.kv_format).row) {
  const DeviceSizes sizes = device_sizes(shape, dtype, limits);
  q_ = device.allocate(sizes.q, "queries");
  attended_ = device.allocate(sizes.attended, "attention output");
  normed_ = device.allocate(sizes.normed, "normed rows");
  mlp_ = device.allocate(sizes.mlp, "MLP rows");
  plain_kv_ = device.allocate(sizes.plain_kv, "K and V rows before they are quantised");
  head_rows_ = device.allocate(sizes.head_rows, "rows for the head");
  head_normed_ = device.allocate(sizes.head_normed, "normed rows for the head");
  head_projected_ = device.allocate(sizes.head_projected, "projected rows for the head");
  logits_ = device.allocate(sizes.logits, "logits");
  frequencies_ = device.allocate(sizes.rotary, "rotary frequencies");
  if (shape.rotates()) {
    const std::vector<float> table = rotary_frequencies(shape);
    const Bytes bytes{static_cast<std::int64_t>(table.size() * sizeof(float))};
    frequencies_from_ = device.allocate_host(bytes);
    std::memcpy(frequencies_from_.data(), table.data(), static_cast<std::size_t>(bytes.n));
    const Copy copy{.to = frequencies_.data(), .from = frequencies_from_.data(), .bytes = bytes};
    device.copy(Stream::copy_in, {&copy, 1});  // the first tables come behind it
  }
}

void Decoder::embed(const OuterWeights& weights, const EmbedInput& input) {
  const std::int64_t width = shape_.word_embed_proj_dim;
  float* embedded = shape_.projects_embeddings() ? floats(normed_) : input.hidden;
  device_.launch(EmbedTokens{.out = embedded,
                             .tokens = input.tokens,
                             .table = weights.token_embedding,
                             .rows = input.rows});
  if (shape_.projects_embeddings()) {
    device_.launch(Gemm{.out = float_rows(input.hidden, shape_.hidden_size),
                        .in = gemm_input(embedded, width, mlp_, input.rows),
                        .weight = weights.project_in,
                        .bias = nullptr,
                        .residual = nullptr,
                        .rows = input.rows,
                        .epilogue = Epilogue::none});
  }
  if (shape_.learned_positions == 0) {
    return;
  }
  device_.launch(AddPositions{.inout = input.hidden,
                              .positions = input.positions,
                              .table = weights.position_embedding,
                              .dtype = dtype_,
                              .rows = input.rows,
                              .dim = shape_.hidden_size,
                              .offset = shape_.position_offset});
}

void Decoder::project_kv(const LayerWeights& weights, const LayerRows& rows,
                         const LayerHooks& hooks) {
  hooks.need(Weight::w_kv);
  hooks.need(Weight::attention_norm_weight);
  hooks.need(Weight::attention_norm_bias);
  hooks.need(Weight::k_norm);
  hooks.begins(messages::SpanKind::Qkv);
  hooks.unpack(Weight::w_kv);
  // The attention input, rounded as it will be stored: all that follows is made from that.
  const Rows act{.data = rows.new_act, .dtype = dtype_, .stride = shape_.hidden_size};
  if (shape_.do_layer_norm_before != 0) {
    norm(act, rows.hidden, weights.attention_norm_weight, weights.attention_norm_bias, rows.rows);
  } else {
    device_.launch(
        Convert{.out = act, .in = rows.hidden, .rows = rows.rows, .dim = shape_.hidden_size});
  }
  make_kv(weights, act, rows.new_kv, rows.places, rows.rows);
  hooks.rows_made();
}

void Decoder::make_kv(const LayerWeights& weights, const Rows& act, void* out,
                      const RotaryPlace* places, std::int64_t rows) {
  const bool quantizes = kv_format_ != KvFormat::plain;
  const Rows kv{.data = quantizes ? plain_kv_.data() : out, .dtype = dtype_, .stride = kv_width()};
  device_.launch(Gemm{.out = kv,
                      .in = act,
                      .weight = weights.w_kv,
                      .bias = weights.b_kv,
                      .residual = nullptr,
                      .rows = rows,
                      .epilogue = Epilogue::none});
  turn(kv, shape_.num_key_value_heads, places, weights.k_norm, rows);
  if (quantizes) {
    device_.launch(QuantizeKv{.out = static_cast<std::byte*>(out),
                              .in = kv.data,
                              .dtype = dtype_,
                              .format = kv_format_,
                              .rows = rows,
                              .kv_heads = shape_.num_key_value_heads,
                              .head_dim = shape_.head_dim});
  }
}

void Decoder::project_queries(const LayerWeights& weights, const LayerRows& rows,
                              const LayerHooks& hooks) {
  hooks.need(Weight::w_q);
  hooks.need(Weight::q_norm);
  hooks.begins(messages::SpanKind::Qkv);
  hooks.unpack(Weight::w_q);
  const Rows q = work_rows(q_, shape_.q_dim());
  device_.launch(Gemm{.out = q,
                      .in = {.data = rows.new_act, .dtype = dtype_, .stride = shape_.hidden_size},
                      .weight = weights.w_q,
                      .bias = weights.b_q,
                      .residual = nullptr,
                      .rows = rows.rows,
                      .epilogue = Epilogue::none});
  turn(q, shape_.num_attention_heads, rows.places, weights.q_norm, rows.rows);
}

void Decoder::turn(const Rows& heads, std::int32_t count, const RotaryPlace* places,
                   const void* norm_weight, std::int64_t rows) {
  if (!shape_.turns_heads()) {
    return;
  }
  device_.launch(Rotate{.inout = heads,
                        .places = places,
                        .frequencies = floats(frequencies_),
                        .norm_weight = norm_weight,
                        .dtype = dtype_,
                        .rows = rows,
                        .heads = count,
                        .head_dim = shape_.head_dim,
                        .rotary_dim = shape_.rotary.dim,
                        .scale = shape_.rotary.scale,
                        .epsilon = shape_.norm_epsilon});
}

void Decoder::attend(const LayerWeights& weights, const LayerRows& rows,
                     const LayerContext& context, const LayerHooks& hooks) {
  if (context.absorbed.count > 0) {
    hooks.need(Weight::w_kv);
  }
  hooks.begins(messages::SpanKind::Attention);
  const auto scatter = [&](void* to, const void* from, std::int64_t row, const RowMove* moves,
                           std::int32_t count) {
    if (count > 0) {
      device_.launch(
          ScatterRows{.out = static_cast<std::byte*>(to),
                      .in = static_cast<const std::byte*>(from) + context.first_row * row,
                      .moves = moves,
                      .row_bytes = row,
                      .count = count});
    }
  };
  const std::int64_t act_row = shape_.hidden_size * size_of(dtype_).n;
  scatter(context.kv, rows.new_kv, kv_row_, context.kv_moves, context.kv_move_count);
  scatter(context.regenerated, rows.new_kv, kv_row_, context.regenerated_moves,
          context.regenerated_move_count);
  scatter(context.here, rows.new_kv, kv_row_, context.here_moves, context.here_move_count);
  scatter(context.act, rows.new_act, act_row, context.act_moves, context.act_move_count);
  const AttentionSequence* sequences = context.sequences;
  const auto attention = [&](const AttendedTogether& together) {
    Attention op = attention_of({.window = context.window,
                                 .blocks = context.blocks,
                                 .sequences = sequences,
                                 .together = together});
    sequences += together.count;
    op.out = attended(context.first_row);
    op.q = queries(context.first_row);
    op.slots[0] = context.kv;
    op.slots[1] = context.regenerated;
    op.slots[2] = context.here;
    return op;
  };
  // Apart, since a GPU chooses its kernel, and how many thread blocks share a context, by the sequence of a launch that has
  // the most new rows: a prompt would take the sharing from all that decode.
  for (const AttendedTogether& together : {context.one_row, context.more_rows}) {
    if (together.count > 0) {
      device_.launch(attention(together));
    }
  }
  if (context.absorbed.count > 0) {
    const std::int64_t row = shape_.num_attention_heads *
                             absorbed_row_floats(shape_.hidden_size, shape_.head_dim,
                                                 context.absorbed.max_context) *
                             static_cast<std::int64_t>(sizeof(float));
    device_.launch(
        AbsorbedAttention{.attention = attention(context.absorbed),
                          .act = context.act,
                          .w_kv = weights.w_kv,
                          .b_kv = weights.b_kv,
                          .scratch = floats(mlp_),  // which nothing else uses before the MLP
                          .scratch_rows = static_cast<std::int32_t>(std::min<std::int64_t>(
                              mlp_.size().n / row, context.absorbed.count)),
                          .positions = context.absorbed_positions});
  }
}

Attention Decoder::attention_of(const AttentionTables& tables) const {
  return {.out = nullptr,
          .q = nullptr,
          .slots = {},
          .dtype = dtype_,
          .format = kv_format_,
          .row_dtype = work_,
          .blocks = tables.blocks,
          .sequences = tables.sequences,
          .sequence_count = tables.together.count,
          .heads = shape_.num_attention_heads,
          .kv_heads = shape_.num_key_value_heads,
          .head_dim = shape_.head_dim,
          .scale = 1.0f / std::sqrt(static_cast<float>(shape_.head_dim)),
          .max_new_tokens = tables.together.max_new_tokens,
          .max_context = tables.together.max_context,
          .window = tables.window};
}

// KV Gen (Eq. 1): rows of ACT blocks to rows of KV blocks in the same slots. Where they are quantised, as
// many at a time as there is room for before that.
void Decoder::regenerate(const LayerWeights& weights, const LayerContext& context,
                         const LayerHooks& hooks) {
  if (context.regenerate.empty()) {
    return;
  }
  hooks.need(Weight::w_kv);
  hooks.need(Weight::k_norm);
  hooks.begins(messages::SpanKind::KvGen);
  hooks.unpack(Weight::w_kv);
  const std::int64_t h = shape_.hidden_size;
  const std::int64_t width = size_of(dtype_).n;
  const std::int64_t at_once =
      kv_format_ == KvFormat::plain ? INT64_MAX : plain_kv_.size().n / (kv_width() * width);
  for (const Regenerate& range : context.regenerate) {
    const std::int64_t end = (range.first_slot + range.count) * kBlockTokens;
    for (std::int64_t row = range.first_slot * kBlockTokens; row < end;) {
      const std::int64_t count = std::min(end - row, at_once);
      const Rows act{.data = static_cast<std::byte*>(context.act) + row * h * width,
                     .dtype = dtype_,
                     .stride = h};
      make_kv(weights, act, static_cast<std::byte*>(context.regenerated) + row * kv_row_,
              context.act_places + row, count);
      row += count;
    }
  }
}

void Decoder::finish(const LayerWeights& weights, const LayerRows& rows, const LayerHooks& hooks) {
  const std::int64_t h = shape_.hidden_size;
  const bool norm_before = shape_.do_layer_norm_before != 0;
  hooks.need(Weight::w_o);
  hooks.begins(messages::SpanKind::Projection);
  hooks.unpack(Weight::w_o);
  float* sum = norm_before ? rows.hidden : floats(normed_);
  device_.launch(Gemm{.out = float_rows(sum, h),
                      .in = work_rows(attended_, shape_.q_dim()),
                      .weight = weights.w_o,
                      .bias = weights.b_o,
                      .residual = rows.hidden,
                      .rows = rows.rows,
                      .epilogue = Epilogue::none});
  if (!norm_before) {
    norm(float_rows(rows.hidden, h), sum, weights.attention_norm_weight,
         weights.attention_norm_bias, rows.rows);
  }
  mlp(weights, rows, hooks);
}

void Decoder::mlp(const LayerWeights& weights, const LayerRows& rows, const LayerHooks& hooks) {
  const std::int64_t h = shape_.hidden_size;
  const bool norm_before = shape_.do_layer_norm_before != 0;
  hooks.need(Weight::fc1);
  hooks.begins(messages::SpanKind::Fc1);
  hooks.unpack(Weight::fc1);
  Rows in = work_rows(normed_, h);
  if (norm_before) {
    norm(in, rows.hidden, weights.mlp_norm_weight, weights.mlp_norm_bias, rows.rows);
  } else {
    in = gemm_input(rows.hidden, h, normed_, rows.rows);
  }
  const Rows between = work_rows(mlp_, shape_.fc1_dim());
  device_.launch(Gemm{.out = between,
                      .in = in,
                      .weight = weights.fc1,
                      .bias = weights.fc1_bias,
                      .residual = nullptr,
                      .rows = rows.rows,
                      .epilogue = shape_.gated_mlp != 0 ? Epilogue::none : activation()});
  if (shape_.gated_mlp != 0) {
    device_.launch(GatedActivation{.out = between,
                                   .in = between,
                                   .rows = rows.rows,
                                   .dim = shape_.ffn_dim,
                                   .activation = activation()});
  }
  hooks.need(Weight::fc2);
  hooks.begins(messages::SpanKind::Fc2);
  hooks.unpack(Weight::fc2);
  float* sum = norm_before ? rows.hidden : floats(normed_);
  device_.launch(Gemm{.out = float_rows(sum, h),
                      .in = between,
                      .weight = weights.fc2,
                      .bias = weights.fc2_bias,
                      .residual = rows.hidden,
                      .rows = rows.rows,
                      .epilogue = Epilogue::none});
  if (!norm_before) {
    norm(float_rows(rows.hidden, h), sum, weights.mlp_norm_weight, weights.mlp_norm_bias,
         rows.rows);
  }
}

void Decoder::head(const OuterWeights& weights, const HeadInput& input) {
  const std::int64_t h = shape_.hidden_size;
  const std::int64_t width = shape_.word_embed_proj_dim;
  device_.launch(ScatterRows{.out = head_rows_.data(),
                             .in = reinterpret_cast<const std::byte*>(input.hidden),
                             .moves = input.moves,
                             .row_bytes = h * static_cast<std::int64_t>(sizeof(float)),
                             .count = input.rows});
  Rows in = work_rows(head_normed_, h);
  if (shape_.has_final_layer_norm != 0) {
    norm(in, floats(head_rows_), weights.final_norm_weight, weights.final_norm_bias, input.rows);
  } else {
    in = gemm_input(floats(head_rows_), h, head_normed_, input.rows);
  }
  if (shape_.projects_embeddings()) {
    const Rows projected = work_rows(head_projected_, width);
    device_.launch(Gemm{.out = projected,
                        .in = in,
                        .weight = weights.project_out,
                        .bias = nullptr,
                        .residual = nullptr,
                        .rows = input.rows,
                        .epilogue = Epilogue::none});
    in = projected;
  }
  device_.launch(Gemm{.out = float_rows(floats(logits_), shape_.vocab_size),
                      .in = in,
                      .weight = weights.head,
                      .bias = nullptr,
                      .residual = nullptr,
                      .rows = input.rows,
                      .epilogue = Epilogue::none});
  device_.launch(SampleTokens{.out = input.sampled,
                              .rows = input.sample_rows,
                              .logits = floats(logits_),
                              .edits = input.edits,
                              .count = input.sample_count,
                              .vocab_size = shape_.vocab_size});
}

void Decoder::norm(const Rows& out, const float* in, const void* weight, const void* bias,
                   std::int32_t rows) {
  if (shape_.norm == Norm::rms) {
    device_.launch(RmsNorm{.out = out,
                           .in = in,
                           .weight = weight,
                           .dtype = dtype_,
                           .rows = rows,
                           .dim = shape_.hidden_size,
                           .epsilon = shape_.norm_epsilon});
    return;
  }
  device_.launch(LayerNorm{.out = out,
                           .in = in,
                           .weight = weight,
                           .bias = bias,
                           .dtype = dtype_,
                           .rows = rows,
                           .dim = shape_.hidden_size,
                           .epsilon = shape_.norm_epsilon});
}

// Rows of float32 as a Gemm reads them: themselves, or a copy in the type it wants.
Rows Decoder::gemm_input(float* in, std::int64_t width, const Buffer& converted,
                         std::int32_t rows) {
  if (work_ == DType::float32) {
    return float_rows(in, width);
  }
  const Rows out = work_rows(converted, width);
  device_.launch(
      Convert{.out = out, .in = in, .rows = rows, .dim = static_cast<std::int32_t>(width)});
  return out;
}

Rows Decoder::work_rows(const Buffer& buffer, std::int64_t width) const {
  return {.data = buffer.data(), .dtype = work_, .stride = width};
}

Epilogue Decoder::activation() const {
  switch (shape_.activation_function) {
    case Activation::relu:
      return Epilogue::relu;
    case Activation::gelu:
      return Epilogue::gelu;
    case Activation::gelu_tanh:
      return Epilogue::gelu_tanh;
    case Activation::silu:
      return Epilogue::silu;
  }
  return Epilogue::none;
}

}  // namespace poise
