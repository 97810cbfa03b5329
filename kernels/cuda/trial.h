#pragma once
// Trials of a product's algorithms: how fast one is, and whether one may replace another. For that
// both must round alike; otherwise a key computed among many rows would differ from one computed alone.
// cuBLAS does not document its order of summation, so a trial compares random rows until a million sums
// agree in every bit. Sums in another order usually differ in the last bits of float32, and still about
// once in ten thousand times after rounding to bfloat16.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "common/dtype.h"
#include "common/units.h"

namespace poise::cuda {

// The rows of a trial. `scratch`: device memory for rows in and out; it belongs to the trial alone,
// and a Way must not use it otherwise.
struct Trial {
  using Way = std::function<void(const void* in, void* out)>;  // launches on `stream`

  std::int64_t rows = 0;
  DType in_dtype = DType::float32;
  std::int64_t in_stride = 0;
  Bytes out_row{};    // one of `out`
  bool adds = false;  // to the float32 numbers in `out`, which are then random
  void* scratch = nullptr;
  Bytes scratch_bytes{};
  cudaStream_t stream = nullptr;

  Bytes in_bytes() const {  // rounded up to where an output may begin
    return {(size_of(in_dtype).n * rows * in_stride + 255) / 256 * 256};
  }
  Bytes out_bytes() const { return {out_row.n * rows}; }
  bool fits() const { return in_bytes().n + out_bytes().n <= scratch_bytes.n; }
};

// The time of one launch, the shortest of a few. Each one follows a write to the rest of `scratch`,
// which clears the cache. Waits for the stream.
// REQUIRES: trial.fits().
Seconds time_of(const Trial& trial, const Trial::Way& way);
// Whether both give the same bits. Waits for the stream, some milliseconds. Without `adds`, outputs
// begin as zeros. REQUIRES: trial.fits().
bool same_bits(const Trial& trial, const Trial::Way& one, const Trial::Way& other);

}  // namespace poise::cuda
