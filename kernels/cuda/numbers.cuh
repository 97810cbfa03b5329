#pragma once
// Numbers of the three stored types on the GPU: conversions (to nearest even, as common/dtype.h),
// and rows of them eight at a time: 16 bytes an access where the row's alignment allows, one by one
// where not. The values are the same either way.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "common/dtype.h"

namespace poise::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

// Calls fn with a null pointer to the type that `dtype` names. Host only.
template <typename Fn>
void with_type(DType dtype, Fn fn) {
  switch (dtype) {
    case DType::float32:
      return fn(static_cast<float*>(nullptr));
    case DType::float16:
      return fn(static_cast<__half*>(nullptr));
    case DType::bfloat16:
      return fn(static_cast<__nv_bfloat16*>(nullptr));
  }
}

inline constexpr int kEight = 8;

struct Eight {
  float x[kEight];
};

template <typename T>
struct alignas(16) Packed {  // 16 bytes of T
  T x[16 / sizeof(T)];
};

// Whether every row of a (rows, cols) array with rows `stride` apart may be accessed in eights.
template <typename T>
inline bool in_eights(const T* data, std::int64_t stride) {
  return reinterpret_cast<std::uintptr_t>(data) % 16 == 0 &&
         stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
}

// Elements from[0 .. count), count in 1 .. 8; zeros behind. `aligned`: from lies at 16 bytes.
template <typename T>
__device__ __forceinline__ Eight load_eight(const T* from, int count, bool aligned) {
  Eight result;
  if (aligned && count >= kEight) {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kEight; i += kEach) {
      const Packed<T> some = *reinterpret_cast<const Packed<T>*>(from + i);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        result.x[i + j] = to_float(some.x[j]);
      }
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      result.x[i] = i < count ? to_float(from[i]) : 0.0f;
    }
  }
  return result;
}

template <typename T>
__device__ __forceinline__ void store_eight(T* to, const Eight& values, int count, bool aligned) {
  if (aligned && count >= kEight) {
    constexpr int kEach = 16 / sizeof(T);
#pragma unroll
    for (int i = 0; i < kEight; i += kEach) {
      Packed<T> some;
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        some.x[j] = from_float<T>(values.x[i + j]);
      }
      *reinterpret_cast<Packed<T>*>(to + i) = some;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      if (i < count) {
        to[i] = from_float<T>(values.x[i]);
      }
    }
  }
}

// A parameter (weight or bias) of a type known only at run time, or none.
struct Parameter {
  const void* data;  // null: `absent` in every place
  DType dtype;
  float absent;
};
__device__ __forceinline__ Eight load_eight(const Parameter& parameter, std::int64_t at, int count,
                                            bool aligned) {
  if (parameter.data == nullptr) {
    Eight result;
#pragma unroll
    for (int i = 0; i < kEight; ++i) {
      result.x[i] = parameter.absent;
    }
    return result;
  }
  switch (parameter.dtype) {
    case DType::float16:
      return load_eight(static_cast<const __half*>(parameter.data) + at, count, aligned);
    case DType::bfloat16:
      return load_eight(static_cast<const __nv_bfloat16*>(parameter.data) + at, count, aligned);
    default:
      return load_eight(static_cast<const float*>(parameter.data) + at, count, aligned);
  }
}
inline bool in_eights(const Parameter& parameter) {
  return reinterpret_cast<std::uintptr_t>(parameter.data) % 16 == 0;
}

}  // namespace poise::cuda
