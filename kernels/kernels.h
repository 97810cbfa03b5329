#pragma once
// Every operation the pipeline runs on a device, on one page. Each is a struct of sizes and pointers
// into device memory. The CPU version in kernels/cpu/ defines what an operation means, the CUDA
// version in kernels/cuda/ is fast, and a test compares the two. A launch owns nothing, allocates
// nothing and throws nothing after its check. Shapes are written outermost first.
//
// Types: the residual stream and logits are float32. Other values between operations are float32 on
// the CPU device and `Device::work_type` on the CUDA device. What is kept between layers or iterations
// (weights, K, V, attention input) has the model's `DType`. A stored value is rounded to that type
// *before* it is used, so a key has the same bits whether it was loaded or computed again
// (common/README section 8).
//
// Sums on the CPU device have a fixed order, for any number of rows or threads and any instruction set: a product of
// matrices is one chain of fused multiply-adds for each output (kernels/README.md has the others). So no batch
// and no policy changes a bit of the output.

#include <cstdint>

#include "common/blocks.h"
#include "common/dtype.h"
#include "common/formats/kv_format.h"
#include "common/kernel_limits.h"
#include "common/model_shape.h"
#include "common/formats/packed_weights.h"

namespace poise {

// A weight matrix in its device's own layout. Device::upload makes it from (rows, cols) row-major. Or a
// packed one: panels of codes, the same on every device, that stand for numbers of `dtype`
// (common/formats/packed_weights.h).
struct Matrix {
  const void* data = nullptr;
  std::int32_t rows = 0;  // outputs
  std::int32_t cols = 0;  // inputs
  DType dtype = DType::float32;
  PackedFormat packed{};
  const std::uint16_t* input_groups = nullptr;  // (parts, cols), where packed.input_groups
  std::int32_t parts = 1;                       // matrices one above the other, of equal rows
};

// out = the numbers of a packed matrix, as a plain one in the device's own layout. Each is the number
// that common/formats/packed_weights.h says, so a product with `out` is the product with the packed matrix.
struct Unpack {
  void* out;      // (weight.rows, weight.cols) of weight.dtype
  Matrix weight;  // packed
};

// Rows of numbers: row r starts at data + r · stride · size_of(dtype).
struct Rows {
  void* data = nullptr;
  DType dtype = DType::float32;
  std::int64_t stride = 0;  // elements
};

// out[r, :] = table[token[r], :]
struct EmbedTokens {
  float* out;                  // (rows, table.cols)
  const std::int32_t* tokens;  // (rows); each < table.rows
  Matrix table;                // (vocab_size, word_embed_proj_dim)
  std::int32_t rows;
};

// inout[r, :] += table[position[r] + offset, :]
struct AddPositions {
  float* inout;                   // (rows, dim)
  const std::int32_t* positions;  // (rows)
  const void* table;              // (max_position_embeddings + offset, dim) row-major, of `dtype`
  DType dtype;
  std::int32_t rows, dim, offset;
};

// out[r, c] = (in[r, c] - mean(in[r, :])) / sqrt(var(in[r, :]) + epsilon) * weight[c] + bias[c],
// rounded to out.dtype
struct LayerNorm {
  Rows out;            // (rows, dim)
  const float* in;     // (rows, dim)
  const void* weight;  // (dim) of `dtype`, or null: 1
  const void* bias;    // (dim) of `dtype`, or null: 0
  DType dtype;
  std::int32_t rows, dim;
  float epsilon;
};

// out[r, c] = in[r, c] / sqrt(mean(in[r, :]²) + epsilon) * weight[c], rounded to out.dtype
struct RmsNorm {
  Rows out;            // (rows, dim)
  const float* in;     // (rows, dim)
  const void* weight;  // (dim) of `dtype`
  DType dtype;
  std::int32_t rows, dim;
  float epsilon;
};

// out[r, c] = in[r, c] rounded to out.dtype. A post-norm model's attention input is stored so.
struct Convert {
  Rows out;         // (rows, dim)
  const float* in;  // (rows, dim)
  std::int32_t rows, dim;
};

enum class Epilogue : std::uint8_t { none, relu, gelu, gelu_tanh, silu };

// out[r, n] = epilogue(Σ_k in[r, k] · weight[n, k] + bias[n]) + residual[r, n], rounded to
// out.dtype. KV Gen is this operation over the rows of ACT blocks with [W_K W_V] (Eq. 1); its `out`
// is slots of KV blocks, or rows that QuantizeKv brings there. The weight may be packed on devices that
// say so (Device::reads_packed).
struct Gemm {
  Rows out;               // (rows, weight.rows)
  Rows in;                // (rows, weight.cols)
  Matrix weight;          // (weight.rows, weight.cols)
  const void* bias;       // (weight.rows) of weight.dtype, or null
  const float* residual;  // (rows, weight.rows) with out's stride, or null; may be out itself
  std::int64_t rows;
  Epilogue epilogue;
};

// The product inside a gated MLP: out[r, c] = activation(in[r, c]) · in[r, dim + c], in float32,
// rounded to out.dtype. `in` is what a Gemm with the rows of W_gate above those of W_up made. `out`
// may be the first half of `in`, with in's type and stride; else they do not overlap.
struct GatedActivation {
  Rows out;  // (rows, dim)
  Rows in;   // (rows, 2 · dim)
  std::int32_t rows, dim;
  Epilogue activation;
};

// Where a row stands, for Rotate.
struct RotaryPlace {
  std::int32_t position;     // in its sequence, 0 to kMaxRotaryPosition
  std::int32_t frequencies;  // a row of the table `frequencies`
};
// Rotates (rotary position embedding) the heads of queries, or those of the keys in [K V] rows, in
// place; before that it norms them where norm_weight is given. For each head x = inout[r, a, :], read
// as float32, with f = frequencies[places[r].frequencies, :] and pairs = rotary_dim / 2:
//
//   norm_weight:     x[d] = x[d] / sqrt(mean(x²) + epsilon) · norm_weight[d]
//   each pair i:     angle = float32(places[r].position) · f[i], one float32 product
//                    c = cos(angle) · scale,  s = sin(angle) · scale
//                    y[i]         = x[i] · c - x[i + pairs] · s
//                    y[i + pairs] = x[i + pairs] · c + x[i] · s       (the rotate_half layout)
//   the other d:     y[d] = x[d]
//
// All of it is float32; y alone is rounded, to inout.dtype. So a key is rounded twice: by the Gemm
// that made it, and here. The pipeline runs this operation over new rows before they are stored or
// read, and over the slots that KV Gen has just filled, so a key has the same bits loaded or made again.
struct Rotate {
  Rows inout;                 // (rows, heads, head_dim); a row's heads lie one behind the other
  const RotaryPlace* places;  // (rows)
  const float* frequencies;   // (any number of rows, rotary_dim / 2)
  const void* norm_weight;    // (head_dim) of `dtype`, or null
  DType dtype;
  std::int64_t rows;
  std::int32_t heads, head_dim;
  std::int32_t rotary_dim;  // even, at most head_dim; 0: norm alone
  float scale;              // of cos and sin: the attention factor of YaRN and LongRoPE, else 1
  float epsilon;            // of the norm
};
inline constexpr std::int32_t kMaxRotaryPosition = (1 << 20) - 1;

// Keys and values to rows of quantised KV blocks, by the definition in common/formats/kv_format.h; every byte of
// a row is written. New rows pass through it before they are stored or read, and so do those of KV Gen:
// a key has the same codes loaded or made again.
struct QuantizeKv {
  std::byte* out;  // (rows, row of the layout), aligned to 16 bytes
  const void* in;  // (rows, 2, kv_heads, head_dim) of `dtype`
  DType dtype;
  KvFormat format;  // int8 or int4
  std::int64_t rows;
  std::int32_t kv_heads, head_dim;
};

// Copies rows of one buffer to rows of another: new K/V rows into the slots that attention reads.
struct RowMove {
  std::int64_t from, to;  // rows
};
struct ScatterRows {
  std::byte* out;  // row t at out + t · row_bytes
  const std::byte* in;
  const RowMove* moves;  // (count)
  std::int64_t row_bytes;
  std::int32_t count;
};

// One block of context as attention reads it (CAPTURE's buf_mapping).
struct ContextBlock {
  std::uint32_t slot;
  std::uint8_t buffer;  // 0: KV buffer (loaded), 1: regenerated buffer, 2: blocks read in place; 3: ACT buffer
                        // (AbsorbedAttention alone)
  std::uint8_t unused[3];
};
struct AttentionSequence {
  std::int32_t first_row;   // of q and out
  std::int32_t new_tokens;  // rows
  std::int32_t context;     // tokens before the first row; row i attends positions 0 .. context + i
  // Into `blocks`; ceil((context + new_tokens) / 16) of them. Those before the window of all of its rows may be
  // missing: then these are others' entries, or none, and first_block may be negative.
  std::int32_t first_block;
};
// out[r, a, :] = Σ_t softmax_t(q[r, a, :] · k[t, a', :] · scale) · v[t, a', :], a' = a / (heads /
// kv_heads); new rows included. With a window the row at position p attends positions
// max(0, p - window + 1) .. p alone; blocks whose positions no row of a sequence attends are not read.
struct Attention {
  void* out;             // (rows, heads, head_dim) of `row_dtype`
  const void* q;         // (rows, heads, head_dim) of `row_dtype`
  const void* slots[3];  // KV buffer, regenerated buffer, blocks read in place: (slots,
                         // block_tokens, 2, kv_heads, head_dim) of `dtype`, or quantised rows
  DType dtype;           // of keys and values, also of the numbers that codes stand for
  KvFormat format = KvFormat::plain;
  DType row_dtype = DType::float32;  // float32 on the CPU device
  const ContextBlock* blocks;
  const AttentionSequence* sequences;  // (sequence_count)
  std::int32_t sequence_count, heads, kv_heads, head_dim;
  float scale;
  // Rows of the longest sequence. The tables are on the device, but the host must size the launch.
  std::int32_t max_new_tokens;
  // Tokens that the last row of the longest context sees, itself included. It decides how many thread
  // blocks share a context, and never changes a result.
  std::int32_t max_context;
  std::int32_t window = 0;  // 0: none
};

// Attention that reads blocks of the ACT buffer as they are: no key or value is made of them ("absorption").
// With a the attention input of position t, q · k = (W_K q) · a + q · b_K, and Σ pₜ vₜ = W_V (Σ pₜ aₜ) + b_V Σ pₜ. So a
// row's query absorbs W_K once, and W_V is multiplied once with a weighted sum; blocks of the other buffers are
// attended as Attention does, in the same softmax. For models whose keys neither turn nor are normed.
// Keys and values of absorbed positions are rounded nowhere; a GPU keeps absorbed queries and sums as two 16-bit numbers
// each. Tolerances are in tests/kernels/absorbed_case.h and in the CUDA test.
struct AbsorbedAttention {
  // As above, with one new row a sequence; plain blocks, no window. Rows of other sequences are not written.
  Attention attention;
  const void* act;            // ACT buffer: (slots, block_tokens, hidden_size) of attention.dtype
  Matrix w_kv;                // [W_K W_V]: (2 · kv_heads · head_dim, hidden_size), not packed
  const void* b_kv;           // (2 · kv_heads · head_dim) of w_kv.dtype, or null
  float* scratch;             // (scratch_rows, heads, absorbed_row_floats(…, max_context)); written
  std::int32_t scratch_rows;  // rows at a time; bits do not depend on it
  std::int64_t positions = 0;  // that are absorbed, by all rows together: a rehearsed speed goes by them
};

// What sampling needs to know of one row of logits.
struct SampleRow {
  std::int32_t row;   // of logits
  float temperature;  // 0: greedy
  float top_p;
  std::int32_t top_k;  // 0: all
  std::uint64_t seed, step;
  std::int32_t logprobs;  // best k to report; -1: none at all
  std::int32_t target;    // >= 0: report this token instead of sampling one
  float min_p = 0;        // tokens of less than this share of the best one's weight are left out
  std::int32_t only_edited = 0;            // 1: only tokens with an edit may be sampled
  std::int32_t first_edit = 0, edits = 0;  // of SampleTokens::edits, by token, each once
  // 1: behind these edits stands a mask, a bit for each token; tokens whose bit is 0 are barred.
  std::int32_t masked = 0;
};
// One token's logit before the draw: x + bias; then x / factor where that is above 0, else x · factor;
// then x - minus, at most ±kLargestLogit. A bias of minus infinity bars the token.
struct LogitEdit {
  std::int32_t token;
  float bias, factor, minus;
};
inline constexpr float kLargestLogit = 3.0e38f;
inline constexpr int kMaxLogprobs = 20;
inline constexpr std::int32_t kNotFinite = -1, kAllBarred = -2;  // instead of a token
struct SampledRow {
  std::int32_t token;  // sampled, or the target; or one of the two above
  float logprob;       // of that token, natural log, before edits, temperature and cuts
  std::int32_t top_count;
  std::int32_t top_token[kMaxLogprobs];  // best first; ties: the lower id first
  float top_logprob[kMaxLogprobs];
};
// Greedy takes the lowest id among equal maxima. A random number is a function of (seed, step)
// alone. Of what min_p, top_k and top_p leave out, each speaks of what the ones before it kept.
// REQUIRES: a row of logits with edits or a mask belongs to one sample alone.
struct SampleTokens {
  SampledRow* out;        // (count)
  const SampleRow* rows;  // (count)
  float* logits;          // (max row + 1, vocab_size); a row with edits or a mask is changed
  // Of all rows; changed. A mask is (ceil(vocab_size / 32)) uint32_t, padded to whole edits.
  LogitEdit* edits;
  std::int32_t count, vocab_size;
};

}  // namespace poise
