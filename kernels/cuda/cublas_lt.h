#pragma once
// The part of cuBLASLt that we use, loaded at run time: the same binary then starts on machines
// without CUDA, and builds without cuBLAS's headers. Names and values are those of cuBLASLt's
// documented ABI; a test compares them with the headers if these are installed. Each process loads it
// once, at the first use; any thread may call its functions.

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>
#include <string>

namespace poise::cuda::lt {

using Status = int;
inline constexpr Status kSuccess = 0;

using Handle = struct HandleOpaque*;
using MatmulDesc = struct MatmulDescOpaque*;
using MatrixLayout = struct MatrixLayoutOpaque*;
using Preference = struct PreferenceOpaque*;

enum ComputeType : int { kCompute32F = 68, kCompute32FPedantic = 69 };
enum MatmulDescAttribute : int {
  kTransA = 3,
  kTransB = 4,
  kEpilogue = 7,
  kBiasPointer = 8,
  kBiasDataType = 26
};
enum Operation : std::int32_t { kOpN = 0, kOpT = 1 };
enum EpilogueKind : std::int32_t {
  kEpilogueDefault = 1,
  kEpilogueRelu = 2,
  kEpilogueBias = 4,
  kEpilogueReluBias = 6
};
enum LayoutAttribute : int { kLayoutCols = 3 };
enum PreferenceAttribute : int {
  kMaxWorkspaceBytes = 1,
  kReductionSchemeMask = 3,
  kMinAlignmentA = 5,
  kMinAlignmentB = 6,
  kMinAlignmentC = 7,
  kMinAlignmentD = 8
};
enum AlgoAttribute : int { kAlgoId = 0, kAlgoTile = 1, kAlgoSplitK = 2, kAlgoStages = 6 };

struct Algo {
  std::uint64_t data[8];
};
struct Heuristic {
  Algo algo;
  std::size_t workspace;
  Status state;
  float waves;
  int reserved[4];
};

// Empty before `load`; all set after it.
struct Functions {
  Status (*create)(Handle*);
  Status (*destroy)(Handle);
  std::size_t (*get_version)();
  Status (*matmul)(Handle, MatmulDesc, const void* alpha, const void* a, MatrixLayout,
                   const void* b, MatrixLayout, const void* beta, const void* c, MatrixLayout,
                   void* d, MatrixLayout, const Algo*, void* workspace, std::size_t, cudaStream_t);
  Status (*desc_create)(MatmulDesc*, ComputeType, cudaDataType_t);
  Status (*desc_destroy)(MatmulDesc);
  Status (*desc_set)(MatmulDesc, MatmulDescAttribute, const void*, std::size_t);
  Status (*layout_create)(MatrixLayout*, cudaDataType_t, std::uint64_t rows, std::uint64_t cols,
                          std::int64_t ld);
  Status (*layout_destroy)(MatrixLayout);
  Status (*layout_set)(MatrixLayout, LayoutAttribute, const void*, std::size_t);
  Status (*preference_create)(Preference*);
  Status (*preference_destroy)(Preference);
  Status (*preference_set)(Preference, PreferenceAttribute, const void*, std::size_t);
  Status (*heuristic)(Handle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout,
                      Preference, int wanted, Heuristic*, int* found);
  Status (*algo_check)(Handle, MatmulDesc, MatrixLayout, MatrixLayout, MatrixLayout, MatrixLayout,
                       const Algo*, Heuristic*);
  Status (*algo_get)(const Algo*, AlgoAttribute, void*, std::size_t, std::size_t* written);
};

// Fails with the dynamic linker's message if there is no cuBLASLt of this CUDA's major version. It
// looks in LD_LIBRARY_PATH, then in the folder POISE_CUBLAS names, then in the toolkit's.
const Functions& functions();

// Fails with the status number if a call did not succeed.
void lt_check(Status status, const char* what);

}  // namespace poise::cuda::lt
