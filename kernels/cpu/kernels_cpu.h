#pragma once
// The operations of kernels/kernels.h on the CPU; they define what each operation means. A call splits
// its work over `workers` and returns when it is done; no other thread may use that pool meanwhile.
// Pointers are host memory with any alignment that their type allows. A call allocates nothing. It
// throws only Defect, before it writes anything, if sizes contradict each other or exceed a limit
// below.
//
// Output has the same bits for any number of rows, workers and any instruction set (isa.h). Every
// element of Gemm is fma(in[k], weight[k], acc) for k = 0, 1, … from 0, then + bias, epilogue,
// + residual, and one rounding to out's type. The orders of the other sums are in
// attention_rows_lanes.h, codes_lanes.h, rows_lanes.h (norms) and logits_lanes.h. exp, tanh, GELU, SiLU, sine and
// cosine are our own polynomials (math_lanes.h).

#include "kernels/cpu/packed_matrix.h"
#include "kernels/cpu/workers.h"
#include "kernels/kernels.h"

namespace poise::cpu {

void embed_tokens(const EmbedTokens& op, Workers& workers);
void add_positions(const AddPositions& op, Workers& workers);
void layer_norm(const LayerNorm& op, Workers& workers);
void rms_norm(const RmsNorm& op, Workers& workers);
void convert(const Convert& op, Workers& workers);
void gated_activation(const GatedActivation& op, Workers& workers);
// head_dim ≤ 256.
void rotate(const Rotate& op, Workers& workers);
// The weight is in panels by pack_matrix, or packed codes. `in` may have any type; `out` must not
// overlap it.
void gemm(const Gemm& op, Workers& workers);
// head_dim ≤ 256. `out` must not overlap `in`.
void quantize_kv(const QuantizeKv& op, Workers& workers);
// `out` is as pack_matrix leaves it.
void unpack(const Unpack& op, Workers& workers);
// Rows that are read must not be rows that are written.
void scatter_rows(const ScatterRows& op, Workers& workers);
// head_dim ≤ 256. Of a sequence's last block only the rows of tokens that exist are read.
void attention(const Attention& op, Workers& workers);
// The same of quantised blocks of a type of 16 bits, from the codes themselves where the shape allows it (common/formats/kv_format.h).
// So the bits are others, but as above they are the same for any number of rows, workers and any instruction set. Made for few rows.
void attention_from_codes(const Attention& op, Workers& workers);
// head_dim ≤ 256, hidden_size ≤ 16384. The order of sums is in absorbed/absorbed_lanes.h.
void absorbed_attention(const AbsorbedAttention& op, Workers& workers);
// Temperatures under 1e-5 are greedy. Sampling scales by temperature, keeps the top_k best (ties:
// the lower id first), of these the smallest set of the best whose share reaches top_p, and draws
// from it with Philox4x32-10 of (seed, step). If any logit is infinite or not a number, the
// token is -1. If logprobs is -1 and there is no target, logprob is 0, which saves a pass.
void sample_tokens(const SampleTokens& op, Workers& workers);

}  // namespace poise::cpu
