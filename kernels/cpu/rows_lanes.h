#pragma once
// The operations that work on one row at a time, over sixteen lanes. Included after one of
// lanes_*.h and math_lanes.h.

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/lane_kernels.h"

namespace poise::cpu {
namespace {

// Calls fn with `data` as a pointer to the type that `dtype` names.
template <typename Fn>
inline void with_type(DType dtype, const void* data, Fn fn) {
  switch (dtype) {
    case DType::float32:
      return fn(static_cast<const float*>(data));
    case DType::float16:
      return fn(static_cast<const Half*>(data));
    case DType::bfloat16:
      return fn(static_cast<const BFloat16*>(data));
  }
}
template <typename Fn>
inline void with_type(DType dtype, void* data, Fn fn) {
  with_type(dtype, const_cast<const void*>(data), [&](const auto* typed) {
    using T = std::remove_const_t<std::remove_pointer_t<decltype(typed)>>;
    fn(const_cast<T*>(typed));
  });
}

inline std::int64_t bytes_of(DType dtype) { return size_of(dtype).n; }

inline void* row_of(const Rows& rows, std::int64_t row) {
  return static_cast<std::byte*>(rows.data) + row * rows.stride * bytes_of(rows.dtype);
}

// Calls fn(first, count) for [0, size) in steps of sixteen; count < 16 only for the last.
template <typename Fn>
inline void in_sixteens(std::int64_t size, Fn fn) {
  std::int64_t c = 0;
  for (; c + Lanes::kCount <= size; c += Lanes::kCount) {
    fn(c, Lanes::kCount);
  }
  if (c < size) {
    fn(c, static_cast<int>(size - c));
  }
}

// The compiler sees the full case apart, where no mask is needed.
template <typename T>
inline Lanes load_some(const T* from, int count) {
  return count == Lanes::kCount ? Lanes::load(from) : Lanes::load_first(from, count);
}
template <typename T>
inline void store_some(Lanes lanes, T* to, int count) {
  if (count == Lanes::kCount) {
    lanes.store(to);
  } else {
    lanes.store_first(to, count);
  }
}
inline Lanes load_parameter(const void* data, DType dtype, std::int64_t at, int count) {
  Lanes result = Lanes::zero();
  with_type(dtype, data, [&](const auto* typed) { result = load_some(typed + at, count); });
  return result;
}

// Mean, then variance around it; in both lane i sums the elements i, i + 16, … in order.
inline void layer_norm_row(const LayerNorm& op, std::int64_t row) {
  const float* in = op.in + row * op.dim;
  const auto dim = static_cast<float>(op.dim);
  Lanes sum = Lanes::zero();
  in_sixteens(op.dim, [&](std::int64_t c, int count) { sum = sum + load_some(in + c, count); });
  const Lanes mean = Lanes::all(sum.sum() / dim);
  Lanes squares = Lanes::zero();
  in_sixteens(op.dim, [&](std::int64_t c, int count) {
    const Lanes distance = Lanes::first(count, load_some(in + c, count) - mean, Lanes::zero());
    squares = Lanes::fma(distance, distance, squares);
  });
  const Lanes scale = Lanes::all(1.0f / square_root(squares.sum() / dim + op.epsilon));
  with_type(op.out.dtype, row_of(op.out, row), [&](auto* out) {
    in_sixteens(op.dim, [&](std::int64_t c, int count) {
      Lanes value = (load_some(in + c, count) - mean) * scale;
      if (op.weight != nullptr) {
        value = value * load_parameter(op.weight, op.dtype, c, count);
      }
      if (op.bias != nullptr) {
        value = value + load_parameter(op.bias, op.dtype, c, count);
      }
      store_some(value, out + c, count);
    });
  });
}

// What a row's numbers are multiplied by so that the mean of their squares is 1; lane i sums the
// squares of elements i, i + 16, … in order.
inline float rms_scale(const float* in, std::int64_t dim, float epsilon) {
  Lanes squares = Lanes::zero();
  in_sixteens(dim, [&](std::int64_t c, int count) {
    const Lanes x = load_some(in + c, count);
    squares = Lanes::fma(x, x, squares);
  });
  return 1.0f / square_root(squares.sum() / static_cast<float>(dim) + epsilon);
}

inline void rms_norm_row(const RmsNorm& op, std::int64_t row) {
  const float* in = op.in + row * op.dim;
  const Lanes scale = Lanes::all(rms_scale(in, op.dim, op.epsilon));
  with_type(op.out.dtype, row_of(op.out, row), [&](auto* out) {
    in_sixteens(op.dim, [&](std::int64_t c, int count) {
      const Lanes weight = load_parameter(op.weight, op.dtype, c, count);
      store_some(load_some(in + c, count) * scale * weight, out + c, count);
    });
  });
}

inline void gated_activation_row(const GatedActivation& op, std::int64_t row) {
  with_type(op.in.dtype, row_of(op.in, row), [&](const auto* in) {
    with_type(op.out.dtype, row_of(op.out, row), [&](auto* out) {
      in_sixteens(op.dim, [&](std::int64_t c, int count) {
        const Lanes gate = apply(op.activation, load_some(in + c, count));
        store_some(gate * load_some(in + op.dim + c, count), out + c, count);
      });
    });
  });
}

// Cosines and sines of one row's pairs, times the scale.
struct RowAngles {
  alignas(64) float cosines[kMaxHeadDim / 2], sines[kMaxHeadDim / 2];

  RowAngles(const Rotate& op, std::int64_t row) {
    const std::int64_t pairs = op.rotary_dim / 2;
    const float* frequencies = op.frequencies + op.places[row].frequencies * pairs;
    const Lanes position = Lanes::all(static_cast<float>(op.places[row].position));
    const Lanes scale = Lanes::all(op.scale);
    in_sixteens(pairs, [&](std::int64_t i, int count) {
      const SineCosine turn = sine_cosine(position * load_some(frequencies + i, count));
      store_some(turn.cosine * scale, cosines + i, count);
      store_some(turn.sine * scale, sines + i, count);
    });
  }
};

template <typename T>
inline void rotate_head(const Rotate& op, const RowAngles& angles, T* inout) {
  alignas(64) float head[kMaxHeadDim];
  in_sixteens(op.head_dim, [&](std::int64_t d, int count) {
    store_some(load_some(inout + d, count), head + d, count);
  });
  if (op.norm_weight != nullptr) {
    const Lanes scale = Lanes::all(rms_scale(head, op.head_dim, op.epsilon));
    in_sixteens(op.head_dim, [&](std::int64_t d, int count) {
      const Lanes weight = load_parameter(op.norm_weight, op.dtype, d, count);
      store_some(load_some(head + d, count) * scale * weight, head + d, count);
    });
  }
  const std::int64_t pairs = op.rotary_dim / 2;
  in_sixteens(pairs, [&](std::int64_t i, int count) {
    const Lanes cosine = load_some(angles.cosines + i, count);
    const Lanes sine = load_some(angles.sines + i, count);
    const Lanes first = load_some(head + i, count);
    const Lanes second = load_some(head + pairs + i, count);
    store_some(first * cosine - second * sine, inout + i, count);
    store_some(second * cosine + first * sine, inout + pairs + i, count);
  });
  if (op.norm_weight != nullptr) {
    in_sixteens(op.head_dim - 2 * pairs, [&](std::int64_t d, int count) {
      store_some(load_some(head + 2 * pairs + d, count), inout + 2 * pairs + d, count);
    });
  }
}

inline void rotate_row(const Rotate& op, std::int64_t row) {
  const RowAngles angles(op, row);
  with_type(op.inout.dtype, row_of(op.inout, row), [&](auto* inout) {
    for (std::int32_t head = 0; head < op.heads; ++head) {
      rotate_head(op, angles, inout + std::int64_t{head} * op.head_dim);
    }
  });
}

inline void convert_row(const Convert& op, std::int64_t row) {
  const float* in = op.in + row * op.dim;
  with_type(op.out.dtype, row_of(op.out, row), [&](auto* out) {
    in_sixteens(op.dim, [&](std::int64_t c, int count) {
      store_some(load_some(in + c, count), out + c, count);
    });
  });
}

// A column of the packed table's panel: every sixteenth element.
inline void embed_row(const EmbedTokens& op, std::int64_t row) {
  const std::int64_t token = op.tokens[row];
  const std::int64_t cols = op.table.cols;
  float* out = op.out + row * cols;
  with_type(op.table.dtype, op.table.data, [&](const auto* table) {
    const auto* from = table + token / 16 * 16 * cols + token % 16;
    for (std::int64_t c = 0; c < cols; ++c) {
      out[c] = to_float(from[16 * c]);
    }
  });
}

inline void add_position_row(const AddPositions& op, std::int64_t row) {
  float* inout = op.inout + row * op.dim;
  const std::int64_t at = (static_cast<std::int64_t>(op.positions[row]) + op.offset) * op.dim;
  in_sixteens(op.dim, [&](std::int64_t c, int count) {
    const Lanes position = load_parameter(op.table, op.dtype, at + c, count);
    store_some(load_some(inout + c, count) + position, inout + c, count);
  });
}

inline void pack_panel(void* dst, const void* src, std::int64_t rows, std::int64_t cols,
                       DType dtype, std::int64_t panel) {
  const int here = rows - 16 * panel < 16 ? static_cast<int>(rows - 16 * panel) : 16;
  if (dtype == DType::float32) {
    transpose_16<true>(static_cast<float*>(dst) + panel * 16 * cols,
                       static_cast<const float*>(src) + panel * 16 * cols, cols, here, cols);
  } else {
    transpose_16<true>(static_cast<Half*>(dst) + panel * 16 * cols,
                       static_cast<const Half*>(src) + panel * 16 * cols, cols, here, cols);
  }
  end_streaming();
}

}  // namespace
}  // namespace poise::cpu
