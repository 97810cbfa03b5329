#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <span>

#include "kernels/cpu/kernels_cpu.h"
#include "kernels/cpu/logits.h"
#include "kernels/philox.h"

namespace poise::cpu {
namespace {

constexpr float kGreedyBelow = 1e-5f;  // vLLM's

std::int32_t draw_token(const SampleRow& row, Logits logits, const GatheredLogits& room) {
  logits.scale = 1.0f / row.temperature;
  Kept kept;
  if (row.min_p > 0) {
    kept = keep_likely(logits, row.min_p);
  }
  if (row.top_k > 0 && row.top_k < logits.count &&
      (kept.value == kLowestLogit || logits.count_at_least(kept.value) > row.top_k)) {
    kept = keep_best(&logits, row.top_k, room);
  }
  if (row.top_p < 1.0f) {
    kept = keep_mass(&logits, kept, static_cast<double>(row.top_p), room);
  }
  return draw(logits, kept, uniform(row.seed, row.step));
}

float edited(float logit, const LogitEdit& edit) {
  if (edit.bias == kLowestLogit) {
    return kLowestLogit;
  }
  const float biased = logit + edit.bias;
  const float scaled = biased > 0 ? biased / edit.factor : biased * edit.factor;
  return std::clamp(scaled - edit.minus, -kLargestLogit, kLargestLogit);
}

// The edits of one row; `bias` becomes the logit before.
void apply_edits(const SampleRow& row, float* data, std::int32_t count,
                 std::span<LogitEdit> edits) {
  for (LogitEdit& edit : edits) {
    const float before = data[edit.token];
    data[edit.token] = edited(before, edit);
    edit.minus = data[edit.token];
    edit.bias = before;
  }
  if (row.only_edited != 0) {
    std::fill(data, data + count, kLowestLogit);
    for (const LogitEdit& edit : edits) {
      data[edit.token] = edit.minus;
    }
  }
}

// Bars the tokens whose bit is not set.
void apply_mask(float* data, std::int32_t count, const LogitEdit* mask) {
  const auto* const bytes = reinterpret_cast<const std::byte*>(mask);
  for (std::int32_t first = 0; first < count; first += 32) {
    std::uint32_t word = 0;
    std::memcpy(&word, bytes + first / 8, sizeof(word));
    const std::int32_t end = std::min(first + 32, count);
    if (word == 0) {
      std::fill(data + first, data + end, kLowestLogit);
    } else if (word != ~std::uint32_t{0}) {
      for (std::int32_t id = first; id < end; ++id) {
        data[id] = (word >> (id - first) & 1) != 0 ? data[id] : kLowestLogit;
      }
    }
  }
}

// With the logits as they are now, some of which may be barred.
std::int32_t choose_token(const SampleRow& row, const Logits& logits, const GatheredLogits& room) {
  if (logits.maximum == kLowestLogit) {
    return kAllBarred;
  }
  if (row.temperature < kGreedyBelow) {
    const float* best = std::find(logits.values, logits.values + logits.count, logits.maximum);
    return static_cast<std::int32_t>(best - logits.values);
  }
  return draw_token(row, logits, room);
}

// The row's mask, if it has one, stands behind `edits`.
void sample_row(const SampleRow& row, float* data, std::int32_t count, std::span<LogitEdit> edits,
                const GatheredLogits& room, SampledRow* out) {
  const LaneKernels& kernels = active_kernels();
  *out = {};
  const LogitScan scan = kernels.scan_logits(data, count);
  if (!scan.finite) {
    out->token = kNotFinite;
    return;
  }
  Logits logits{kernels, data, nullptr, count, scan.maximum, 1.0f};
  double log_mass = 0;
  const auto logprob = [&](float logit) {
    return static_cast<float>(static_cast<double>(logit - scan.maximum) - log_mass);
  };
  const bool reports = row.logprobs >= 0 || row.target >= 0;
  if (reports) {  // of the logits before any edit
    log_mass = std::log(logits.mass_at_least(kLowestLogit));
    if (row.logprobs > 0) {
      out->top_count = best_ids(logits, std::min(row.logprobs, kMaxLogprobs), out->top_token);
      std::transform(out->top_token, out->top_token + out->top_count, out->top_logprob,
                     [&](std::int32_t id) { return logprob(data[id]); });
    }
  }
  const bool edits_any = !edits.empty() || row.only_edited != 0 || row.masked != 0;
  if (row.target >= 0) {
    out->token = row.target;
  } else if (edits_any) {
    apply_edits(row, data, count, edits);
    if (row.masked != 0) {
      apply_mask(data, count, edits.data() + edits.size());
    }
    logits.maximum = kernels.scan_logits(data, count).maximum;
    out->token = choose_token(row, logits, room);
  } else {
    out->token = row.temperature < kGreedyBelow ? scan.argmax : draw_token(row, logits, room);
  }
  if (reports && out->token >= 0) {
    const auto edit = std::ranges::lower_bound(edits, out->token, {}, &LogitEdit::token);
    const bool was_edited = row.target < 0 && edit != edits.end() && edit->token == out->token;
    out->logprob = logprob(was_edited ? edit->bias : data[out->token]);
  }
}

}  // namespace

void sample_tokens(const SampleTokens& op, Workers& workers) {
  static_assert(8 * GatheredLogits::kCapacity <= Workers::kScratch.n);
  workers.parallel_for(op.count, [&](std::int64_t i, int worker) {
    const SampleRow& row = op.rows[i];
    auto* scratch = workers.scratch(worker);
    const GatheredLogits room{
        reinterpret_cast<float*>(scratch),
        reinterpret_cast<std::int32_t*>(scratch + 4 * GatheredLogits::kCapacity)};
    sample_row(row, op.logits + static_cast<std::int64_t>(row.row) * op.vocab_size, op.vocab_size,
               {op.edits + row.first_edit, static_cast<std::size_t>(row.edits)}, room, &op.out[i]);
  });
}

}  // namespace poise::cpu
