#pragma once
// Trials of a product's algorithms: how fast one is, and whether two may stand for each other. For
// that they must round alike, or a key made again among many rows would not be the one made alone.
// cuBLAS does not say in which order it sums, so random rows are asked, until a million sums agreed in
// every bit. Sums of another order differ in the last bits of float32 more often than not, and about
// once in ten thousand times still after their rounding to bfloat16.

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>

#include "common/dtype.h"
#include "common/units.h"

namespace poise::cuda {

// What the rows of both are like, and who computes them. `scratch`: of the device, for rows in and
// out; nobody else uses it meanwhile, nor do the ways.
struct Trial {
  using Way = std::function<void(const void* in, void* out)>;  // launches on `stream`

  std::int64_t rows = 0;
  DType in_dtype = DType::float32;
  std::int64_t in_stride = 0;
  Bytes out_row{};    // one of `out`
  bool adds = false;  // to what float32 numbers stand in `out`, which are random then
  void* scratch = nullptr;
  Bytes scratch_bytes{};
  cudaStream_t stream = nullptr;

  Bytes in_bytes() const {  // to where an output may begin
    return {(size_of(in_dtype).n * rows * in_stride + 255) / 256 * 256};
  }
  Bytes out_bytes() const { return {out_row.n * rows}; }
  bool fits() const { return in_bytes().n + out_bytes().n <= scratch_bytes.n; }
};

// What one launch takes, whatever the rows are: the shortest of a few, each behind a write to all of
// `scratch` that the rows leave. Waits for the stream.
// REQUIRES: trial.fits().
Seconds time_of(const Trial& trial, const Trial::Way& way);
// Waits for the stream, some milliseconds. Where they do not add, outputs begin as zeros. REQUIRES:
// trial.fits().
bool same_bits(const Trial& trial, const Trial::Way& one, const Trial::Way& other);

}  // namespace poise::cuda
