#pragma once
// The instructions that attention and products of few rows are made of, each as one function: tensor
// core products, fragments out of shared memory, copies into it that run by themselves; what warps of a
// block and blocks of a cluster wait for. Compute capability 8.0 and later, clusters from 9.0 on.
// PTX ISA names the lanes' parts: lane = 4·g + t, g the group (0 .. 7), t the thread in it (0 .. 3).

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace poise::cuda {

using SharedAddress = std::uint32_t;
__device__ __forceinline__ SharedAddress shared_address(const void* p) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(p));
}

// 16 bytes from global to shared memory; zeros instead where not `exists` (nothing is read then).
__device__ __forceinline__ void copy_16_async(SharedAddress to, const void* from, bool exists) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;\n" ::"r"(to), "l"(from),
               "r"(exists ? 16 : 0)
               : "memory");
}
// 16 bytes that this thread holds, likewise; others see them behind a barrier.
__device__ __forceinline__ void store_16(SharedAddress to, const std::uint32_t (&words)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};\n" ::"r"(to), "r"(words[0]),
               "r"(words[1]), "r"(words[2]), "r"(words[3])
               : "memory");
}
// Ends a group of copies; a group may be empty.
__device__ __forceinline__ void end_copy_group() {
  asm volatile("cp.async.commit_group;\n" ::: "memory");
}
// Until at most kLeft of this thread's groups, the youngest, are under way.
template <int kLeft>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;\n" ::"n"(kLeft) : "memory");
}

// A barrier in shared memory that `count` arrivals complete, phase after phase; a waiting thread names the
// parity of the phase. Arrivals release what came before them, waits acquire it.
__device__ __forceinline__ void begin_barrier(SharedAddress barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\n" ::"r"(barrier), "r"(count) : "memory");
}
__device__ __forceinline__ void arrive(SharedAddress barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }\n" ::"r"(barrier)
               : "memory");
}
// This thread arrives once its copies so far are there.
__device__ __forceinline__ void arrive_after_copies(SharedAddress barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];\n" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void wait(SharedAddress barrier, unsigned parity) {
  unsigned done = 0;
  while (done == 0) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.try_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done; }\n"
#else
    asm volatile(
        "{ .reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done; }\n"
#endif
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
  }
}

// Four 8 × 8 matrices of 16-bit numbers; lane l names row l % 8 of matrix l / 8 (16 bytes). Lane 4g + t
// gets numbers 2t and 2t + 1 of row g of each …
__device__ __forceinline__ void load_matrices(std::uint32_t (&to)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}
// … or of column g, in rows 2t and 2t + 1.
__device__ __forceinline__ void load_matrices_transposed(std::uint32_t (&to)[4],
                                                         SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(row)
               : "memory");
}

// The reverse of load_matrices, from compute capability 9.0 on.
__device__ __forceinline__ void store_matrices(SharedAddress row, std::uint32_t a, std::uint32_t b,
                                               std::uint32_t c, std::uint32_t d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(row),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}

// A copy of whole vectors from shared to global memory that runs by itself, from compute capability 9.0 on. The threads that
// wrote what it reads call show_to_copies() first, and a barrier of theirs follows.
__device__ __forceinline__ void show_to_copies() {
  asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
__device__ __forceinline__ void copy_out(void* to, SharedAddress from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n" ::"l"(to), "r"(from),
               "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void end_copies_out() {
  asm volatile("cp.async.bulk.commit_group;\n" ::: "memory");
}
// Until what this thread's copies read may be written again.
__device__ __forceinline__ void wait_copies_out() {
  asm volatile("cp.async.bulk.wait_group.read 0;\n" ::: "memory");
}

// sum (16 × 8) += a (16 × 16) · b (16 × 8). Lane 4g + t holds
//   a[0]: row g, columns 2t, 2t + 1; a[1]: row g + 8; a[2], a[3]: the same, columns + 8
//   b0: rows 2t, 2t + 1 of column g; b1: rows + 8
//   sum[0], sum[1]: row g, columns 2t, 2t + 1; sum[2], sum[3]: row g + 8
template <typename T>
__device__ __forceinline__ void multiply_add(float (&sum)[4], const std::uint32_t (&a)[4],
                                             std::uint32_t b0, std::uint32_t b1);
template <>
__device__ __forceinline__ void multiply_add<__half>(float (&sum)[4], const std::uint32_t (&a)[4],
                                                     std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ __forceinline__ void multiply_add<__nv_bfloat16>(float (&sum)[4],
                                                            const std::uint32_t (&a)[4],
                                                            std::uint32_t b0, std::uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
      "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two numbers rounded to T, `low` in the lower half.
template <typename T>
__device__ __forceinline__ std::uint32_t pack(float low, float high);
template <>
__device__ __forceinline__ std::uint32_t pack<__half>(float low, float high) {
  const __half2 both = __floats2half2_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}
template <>
__device__ __forceinline__ std::uint32_t pack<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const std::uint32_t*>(&both);
}

// The cluster's barrier: an arrive and a wait by turns, all threads. What was written before
// `cluster_arrive`, the memory of another block included, is seen behind the wait; `cluster_begins`
// says only that this block runs, which costs less. Blocks that have ended are not waited for, so a
// block may leave before it arrives for the first time.
__device__ __forceinline__ void cluster_begins() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;\n" ::: "memory");
#else
  __trap();  // such a GPU has clusters of one block, which have nothing to wait for
#endif
}
__device__ __forceinline__ void cluster_arrive() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\n" ::: "memory");
#else
  __trap();
#endif
}
__device__ __forceinline__ void cluster_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;\n" ::: "memory");
#else
  __trap();
#endif
}
// A variable in the shared memory of a block of the cluster, named by this block's own. That block
// has begun (it has arrived at a barrier) and has not ended.
template <typename V>
__device__ __forceinline__ V* of_block_in_cluster(V* mine, int rank) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  return static_cast<V*>(__cluster_map_shared_rank(mine, rank));
#else
  __trap();
  return mine;
#endif
}

// 2^x within 2 ulp; results below 2⁻¹²⁶ are 0; 2^0 is 1.
__device__ __forceinline__ float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;\n" : "=f"(result) : "f"(x));
  return result;
}

}  // namespace poise::cuda
