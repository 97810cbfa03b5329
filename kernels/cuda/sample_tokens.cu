// A block of threads to a row of logits. One pass finds the maximum and whether all are finite, which
// is all that greedy needs. The rest are searches: a logit's *key* is its rank above its negated id,
// so that keys are distinct and ordered best first, ties by lower id. top_k and top_p are then each one
// smallest key that is kept, found by halving: how many, or how much, lies at or above a key?
//
// A mass of probability is a whole number: each weight exp((logit - maximum) / temperature) ≤ 1 is
// rounded to a multiple of 2⁻⁴⁰. Their sums are exact, whatever the order; 2²⁴ of them fit. A token
// lighter than 2⁻⁴¹ of the best is never drawn.

#include <cstdint>
#include <limits>

#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/reductions.cuh"
#include "kernels/philox.h"

namespace poise::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr float kGreedyBelow = 1e-5f;  // vLLM's
constexpr int kUnroll = 8;             // loads under way in each thread

using Key = unsigned long long;
using Mass = unsigned long long;

__device__ Key key_of(float logit, std::int32_t id) {
  const std::uint32_t bits = __float_as_uint(__fadd_rn(logit, 0.0f));  // -0 becomes 0: they tie
  const std::uint32_t rank = (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
  return (Key{rank} << 32) | ~static_cast<std::uint32_t>(id);
}
__device__ std::int32_t id_of(Key key) {
  return static_cast<std::int32_t>(~static_cast<std::uint32_t>(key));
}

// One copy of the code, so that a token weighs the same wherever it is asked.
__device__ __noinline__ Mass weight_of(float logit, float maximum, float scale) {
  return __float2ull_rn(expf((logit - maximum) * scale) * 0x1p40f);
}

__device__ float edited(float logit, const LogitEdit& edit) {
  if (edit.bias == -INFINITY) {
    return -INFINITY;
  }
  const float biased = __fadd_rn(logit, edit.bias);
  const float scaled = biased > 0 ? __fdiv_rn(biased, edit.factor) : __fmul_rn(biased, edit.factor);
  return fminf(fmaxf(__fsub_rn(scaled, edit.minus), -kLargestLogit), kLargestLogit);
}

struct Shared {
  Key keys[kWarps];
  double sums[kWarps];
  Key best[kMaxLogprobs];
  int found;
};

class Row {
 public:
  __device__ Row(float* logits, std::int32_t count, Shared& shared)
      : logits_(logits), count_(count), shared_(shared) {}

  // Whether all are finite; then what follows may be asked. All threads call all of these.
  __device__ bool scan() {
    Key best = 0;
    Key broken = 0;
    each([&](std::int32_t id, float logit) {
      broken |= isfinite(logit) ? 0 : 1;
      const Key key = key_of(logit, id);
      best = key > best ? key : best;
    });
    best = over_block<kThreads>(best, Key{0}, Larger(), shared_.keys);
    best_ = id_of(best);
    maximum_ = logits_[best_ >= 0 && best_ < count_ ? best_ : 0];
    return over_block<kThreads>(broken, Key{0}, Larger(), shared_.keys) == 0;
  }
  __device__ std::int32_t best() const { return best_; }
  // Of the logits before `edit`.
  __device__ float logprob(std::int32_t id) { return logprob_of(logits_[id]); }
  // All threads ask for the first time together, before `edit`.
  __device__ float logprob_of(float logit) {
    if (log_mass_ < 0) {
      double mass = 0;
      each([&](std::int32_t, float other) { mass += expf(other - maximum_); });
      log_mass_ = log(over_block<kThreads>(mass, 0.0, Add(), shared_.sums));
      top_logit_ = maximum_;
    }
    return static_cast<float>(static_cast<double>(logit - top_logit_) - log_mass_);
  }

  // Changes the row; the bias of each edit becomes the logit before. False if every token is barred.
  __device__ bool edit(const SampleRow& row, LogitEdit* edits) {
    for (std::int32_t i = threadIdx.x; i < row.edits; i += kThreads) {
      const float before = logits_[edits[i].token];
      const float after = edited(before, edits[i]);
      edits[i].bias = before;
      edits[i].minus = after;
      if (row.only_edited == 0) {
        logits_[edits[i].token] = after;
      }
    }
    if (row.only_edited != 0) {
      __syncthreads();
      for (std::int32_t id = threadIdx.x; id < count_; id += kThreads) {
        logits_[id] = -INFINITY;
      }
      __syncthreads();
      for (std::int32_t i = threadIdx.x; i < row.edits; i += kThreads) {
        logits_[edits[i].token] = edits[i].minus;
      }
    }
    if (row.masked != 0) {
      __syncthreads();
      const auto* mask = reinterpret_cast<const std::uint32_t*>(edits + row.edits);
      for (std::int32_t id = threadIdx.x; id < count_; id += kThreads) {
        if ((mask[id / 32] >> (id % 32) & 1) == 0) {
          logits_[id] = -INFINITY;
        }
      }
    }
    __syncthreads();
    scan();
    return maximum_ > -INFINITY;
  }
  // The logit of a token before `edit`.
  __device__ float before(std::int32_t id, const SampleRow& row, const LogitEdit* edits) const {
    std::int32_t first = 0;
    std::int32_t end = row.edits;
    while (first < end) {
      const std::int32_t middle = first + (end - first) / 2;
      (edits[middle].token < id ? first : end) = edits[middle].token < id ? middle + 1 : middle;
    }
    return first < row.edits && edits[first].token == id ? edits[first].bias : logits_[id];
  }

  __device__ std::int32_t draw(const SampleRow& row) {
    scale_ = 1.0f / row.temperature;
    Key kept = row.min_p > 0 ? keep_likely(row.min_p) : 0;
    if (row.top_k > 0 && row.top_k < count_ &&
        (kept == 0 || at_least<One>(kept) > static_cast<Mass>(row.top_k))) {
      kept = keep<One>(0, static_cast<Mass>(row.top_k));
    }
    if (row.top_p < 1.0f) {
      const auto wanted = static_cast<Mass>(
          ceil(static_cast<double>(row.top_p) * static_cast<double>(at_least<Weight>(kept))));
      kept = keep<Weight>(kept, wanted > 0 ? wanted : 1);
    }
    return pick(kept, uniform(row.seed, row.step));
  }

  // The k best ids, best first, into `out` with their logprobs; returns how many. k ≤ kMaxLogprobs.
  __device__ std::int32_t report_best(std::int32_t k, SampledRow* out) {
    k = k < count_ ? k : count_;
    const Key kept = k < count_ ? keep<One>(0, static_cast<Mass>(k)) : 0;
    if (threadIdx.x == 0) {
      shared_.found = 0;
    }
    __syncthreads();
    each([&](std::int32_t id, float logit) {
      const Key key = key_of(logit, id);
      if (key >= kept) {
        shared_.best[atomicAdd(&shared_.found, 1)] = key;  // in any order: sorted below
      }
    });
    logprob(0);  // all threads, so that its mass is known below
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < k) {
      const Key mine = shared_.best[threadIdx.x];
      int place = 0;
      for (int i = 0; i < k; ++i) {
        place += shared_.best[i] > mine ? 1 : 0;
      }
      out->top_token[place] = id_of(mine);
      out->top_logprob[place] = logprob(id_of(mine));
    }
    return k;
  }

 private:
  // fn(id, logit) for this thread's share of the row: ids t, t + 1024, …
  template <typename Fn>
  __device__ __forceinline__ void each(Fn fn) const {
    std::int32_t id = threadIdx.x;
    for (; id + (kUnroll - 1) * kThreads < count_; id += kUnroll * kThreads) {
      float some[kUnroll];
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        some[i] = logits_[id + i * kThreads];
      }
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        fn(id + i * kThreads, some[i]);
      }
    }
    for (; id < count_; id += kThreads) {
      fn(id, logits_[id]);
    }
  }

  // What a token counts as.
  struct One {
    static __device__ Mass of(const Row&, float) { return 1; }
  };
  struct Weight {
    static __device__ Mass of(const Row& row, float logit) {
      return weight_of(logit, row.maximum_, row.scale_);
    }
  };

  template <typename What>
  __device__ Mass at_least(Key key) {
    Mass sum = 0;
    each([&](std::int32_t id, float logit) {
      if (key_of(logit, id) >= key) {
        sum += What::of(*this, logit);
      }
    });
    return over_block<kThreads>(sum, Mass{0}, Add(), shared_.keys);
  }

  // Above all keys of tokens of less than `share` of the best one's weight. Weights rise with ranks.
  __device__ Key keep_likely(float share) const {
    Key holds = key_of(maximum_, 0) >> 32;
    Key fails = 0x007fffff;  // of minus infinity, which weighs nothing
    while (holds > fails + 1) {
      const Key middle = fails + (holds - fails) / 2;
      const auto rank = static_cast<std::uint32_t>(middle);
      const float logit = __uint_as_float((rank >> 31) != 0 ? rank & 0x7fffffffu : ~rank);
      const bool likely = static_cast<double>(weight_of(logit, maximum_, scale_)) >=
                          static_cast<double>(share) * 0x1p40;
      (likely ? holds : fails) = middle;
    }
    return holds << 32;
  }

  // The largest key k with at_least(k) ≥ wanted. REQUIRES: it holds for `low`, wanted ≥ 1.
  template <typename What>
  __device__ Key keep(Key low, Mass wanted) {
    // First the rank alone, all its ids included.
    Key fails = (key_of(maximum_, 0) >> 32) + 1;
    Key holds = low >> 32;
    const auto from = [&](Key rank) {
      const Key key = rank << 32;
      return key > low ? key : low;
    };
    while (fails - holds > 1) {
      const Key middle = holds + (fails - holds) / 2;
      (at_least<What>(from(middle)) >= wanted ? holds : fails) = middle;
    }
    // Then, of its ties, as many as are needed, the lowest ids first.
    const Key first = from(holds);
    if (at_least<One>(first) - at_least<One>(from(holds + 1)) <= 1) {
      return first;
    }
    Key lowest = first;
    const Key no_id = (holds << 32) | 0xffffffffu;  // of id 0: the largest key of this rank
    Key too_high = no_id + 1;
    const Key of_last_id = (holds << 32) | ~static_cast<std::uint32_t>(count_ - 1);
    lowest = of_last_id > lowest ? of_last_id : lowest;
    while (too_high - lowest > 1) {
      const Key middle = lowest + (too_high - lowest) / 2;
      (at_least<What>(middle) >= wanted ? lowest : too_high) = middle;
    }
    return lowest;
  }

  // The id at which the running mass of what is kept, in the order of ids, passes `point` of it all.
  // Warp w sums ids [w · part, (w + 1) · part); the one in which it passes looks closer.
  __device__ std::int32_t pick(Key kept, double point) {
    const int lane = threadIdx.x % kWarp;
    const int warp = threadIdx.x / kWarp;
    const std::int32_t part = (count_ + kThreads - 1) / kThreads * kWarp;
    const std::int32_t begin = warp * part;
    const std::int32_t end = begin + part < count_ ? begin + part : count_;
    const auto mass_of = [&](std::int32_t id) {
      return id < end && key_of(logits_[id], id) >= kept ? Weight::of(*this, logits_[id]) : 0;
    };
    Mass mine = 0;
    for (std::int32_t id = begin + lane; id < end; id += kWarp) {
      mine += mass_of(id);
    }
    mine = over_warp(mine, Add());
    if (lane == 0) {
      shared_.keys[warp] = mine;
    }
    __syncthreads();
    Mass total = 0;
    Mass before = 0;
    for (int w = 0; w < kWarps; ++w) {
      before += w < warp ? shared_.keys[w] : 0;
      total += shared_.keys[w];
    }
    Mass goal = static_cast<Mass>(point * static_cast<double>(total));
    goal = goal < total ? goal : total - 1;  // `total` is at least the best token's weight
    if (before <= goal && goal < before + mine) {
      for (std::int32_t first = begin; first < end; first += kWarp) {
        const Mass weight = mass_of(first + lane);
        Mass running = weight;
#pragma unroll
        for (int distance = 1; distance < kWarp; distance *= 2) {
          const Mass other = __shfl_up_sync(kAllLanes, running, distance);
          running += lane >= distance ? other : 0;
        }
        if (before + running - weight <= goal && goal < before + running) {
          shared_.found = first + lane;  // one lane
        }
        before += __shfl_sync(kAllLanes, running, kWarp - 1);
        if (goal < before) {
          break;
        }
      }
    }
    __syncthreads();
    const std::int32_t chosen = shared_.found;
    __syncthreads();
    return chosen;
  }

  float* const logits_;  // (count)
  const std::int32_t count_;
  Shared& shared_;
  std::int32_t best_ = 0;
  float maximum_ = 0;
  float scale_ = 1;       // 1 / temperature
  double log_mass_ = -1;  // of exp(logit - top_logit); negative: not known yet
  float top_logit_ = 0;   // the maximum before `edit`
};

__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const SampleTokens op) {
  __shared__ Shared shared;
  const SampleRow row = op.rows[blockIdx.x];
  SampledRow* out = op.out + blockIdx.x;
  Row logits(op.logits + std::int64_t{row.row} * op.vocab_size, op.vocab_size, shared);
  auto* words = reinterpret_cast<std::uint32_t*>(out);
  if (threadIdx.x < sizeof(SampledRow) / 4) {
    words[threadIdx.x] = 0;
  }
  LogitEdit* edits = op.edits + row.first_edit;
  std::int32_t token = kNotFinite;
  float logprob = 0;
  std::int32_t top_count = 0;
  if (logits.scan()) {
    const bool reports = row.logprobs >= 0 || row.target >= 0;
    if (reports) {  // of the logits before any edit
      logits.logprob(0);
      if (row.logprobs > 0) {
        top_count =
            logits.report_best(row.logprobs < kMaxLogprobs ? row.logprobs : kMaxLogprobs, out);
      }
    }
    const bool edits_any =
        row.target < 0 && (row.edits > 0 || row.only_edited != 0 || row.masked != 0);
    if (edits_any) {
      __syncthreads();  // what was reported has been read
    }
    if (edits_any && !logits.edit(row, edits)) {
      token = kAllBarred;
    } else {
      token = row.target >= 0                  ? row.target
              : row.temperature < kGreedyBelow ? logits.best()
                                               : logits.draw(row);
    }
    if (reports && token >= 0) {
      logprob =
          edits_any ? logits.logprob_of(logits.before(token, row, edits)) : logits.logprob(token);
    }
  }
  if (threadIdx.x == 0) {
    out->token = token;
    out->logprob = logprob;
    out->top_count = top_count;
  }
}

}  // namespace

void sample_tokens(const SampleTokens& op, cudaStream_t stream) {
  static_assert(sizeof(SampledRow) % 4 == 0 && sizeof(SampledRow) / 4 < kWarp * 2);
  require(op.count <= 0 || op.vocab_size >= 1, "a row of logits has at least one");
  require(op.vocab_size < 1 << 24, "masses of fewer than 2^24 tokens fit");
  launch("sample tokens", &sample_kernel, {.blocks = op.count, .threads = kThreads}, stream, op);
}

}  // namespace poise::cuda
