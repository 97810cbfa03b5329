// A thread makes eight inputs of four of a panel's sixteen rows: four threads read the sixteen bytes
// that hold one input of the rows, and a warp writes 8 · 8 neighbouring inputs of every fourth row, 16
// bytes a thread. All loads and stores of a warp fill whole sectors; no shared memory is needed.
#include <type_traits>

#include "common/formats/packed_weights.h"
#include "kernels/cuda/kernels_cuda.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/numbers.cuh"

namespace poise::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kRowsEach = 4;
constexpr std::int32_t kInputsEach = kThreads / (kPackedRows / kRowsEach) * kEight;  // of a block

template <typename T>
struct PanelsToUnpack {
  T* out;                             // (rows, cols)
  const std::uint8_t* panels;         // as common/formats/packed_weights.h draws them
  const std::uint16_t* input_groups;  // (parts, cols), or null
  std::int64_t panel_bytes, scales, zeros;
  std::int32_t panels_of_a_part, cols, group;
  bool has_zeros, aligned;
};

template <typename Scale>
struct alignas(sizeof(Scale) * kRowsEach) FourScales {
  Scale x[kRowsEach];
};

// What a group of inputs has for four rows. The integers' offset (8, 128) is part of `zero`, and so is
// 2^23, which turns a code in the low bits of a float into a number.
struct FourGroups {
  float scale[kRowsEach], zero[kRowsEach];
};

constexpr float kWhole = 8388608.0F;  // 2^23: its bits with a code in the low ones are 2^23 + code

template <Codes kCodes, typename Scale, typename T>
__device__ __forceinline__ FourGroups groups_at(const PanelsToUnpack<T>& op,
                                                const std::uint8_t* panel, std::int32_t group,
                                                int first_row) {
  FourGroups result;
  const auto scales = *reinterpret_cast<const FourScales<Scale>*>(
      panel + op.scales + (group * kPackedRows + first_row) * static_cast<int>(sizeof(Scale)));
  std::uint32_t zeros = 0;
  if (op.has_zeros) {
    zeros =
        *reinterpret_cast<const std::uint32_t*>(panel + op.zeros + group * kPackedRows + first_row);
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    result.scale[i] = to_float(scales.x[i]);
    const auto zero = static_cast<std::int8_t>(zeros >> (8 * i) & 0xff);
    result.zero[i] = kWhole + (kCodes == Codes::int4 ? 8.0F : 128.0F) + static_cast<float>(zero);
  }
  return result;
}

__device__ __forceinline__ float float8_number(std::uint32_t bits) {
  const float magnitude = (bits & 0x7f) == 0x7f ? __uint_as_float(0x7fc00000u)
                                                : __uint_as_float((bits & 0x7f) << 20) * 0x1p120F;
  return __uint_as_float(__float_as_uint(magnitude) | (bits & 0x80) << 24);
}

// The number of row i, from the four bytes of one input (int4: of two).
template <Codes kCodes>
__device__ __forceinline__ float number(std::uint32_t codes, int i, bool odd,
                                        const FourGroups& group) {
  if constexpr (kCodes == Codes::float8) {
    return __fmul_rn(group.scale[i], float8_number(codes >> (8 * i) & 0xff));
  } else {
    std::uint32_t code;
    if constexpr (kCodes == Codes::int4) {
      code = codes >> (8 * i + (odd ? 4 : 0)) & 0xf;
    } else {
      code = (codes >> (8 * i) & 0xff) ^ 0x80;
    }
    const float difference = __fsub_rn(__uint_as_float(0x4b000000u | code), group.zero[i]);
    return __fmul_rn(group.scale[i], difference);
  }
}

template <Codes kCodes, typename Scale, typename T>
__global__ void __launch_bounds__(kThreads)
    unpack_kernel(PanelsToUnpack<T> op, unsigned parts_of_a_panel) {
  const std::int32_t number_of_panel = static_cast<std::int32_t>(blockIdx.x / parts_of_a_panel);
  const int first_row = static_cast<int>(threadIdx.x % 4) * kRowsEach;
  const std::int32_t k = static_cast<std::int32_t>(blockIdx.x % parts_of_a_panel) * kInputsEach +
                         static_cast<std::int32_t>(threadIdx.x / 4) * kEight;
  if (k >= op.cols) {
    return;
  }
  const std::uint8_t* panel = op.panels + number_of_panel * op.panel_bytes;
  const int count = op.cols - k < kEight ? op.cols - k : kEight;
  // Codes of inputs beyond the last are not read.
  constexpr int kInputsOfAWord = kCodes == Codes::int4 ? 2 : 1;
  std::uint32_t codes[kEight / kInputsOfAWord];
#pragma unroll
  for (int j = 0; j < kEight / kInputsOfAWord; ++j) {
    codes[j] = j * kInputsOfAWord < count
                   ? __ldcs(reinterpret_cast<const std::uint32_t*>(
                         panel + (k / kInputsOfAWord + j) * kPackedRows + first_row))
                   : 0;
  }
  Eight numbers[kRowsEach];
  if (op.input_groups == nullptr && (op.group == 0 || op.group % kEight == 0)) {
    const FourGroups group =
        groups_at<kCodes, Scale>(op, panel, op.group == 0 ? 0 : k / op.group, first_row);
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        numbers[i].x[j] = number<kCodes>(codes[j / kInputsOfAWord], i, j % 2 != 0, group);
      }
    }
  } else {
    const std::uint16_t* table =
        op.input_groups == nullptr
            ? nullptr
            : op.input_groups +
                  static_cast<std::int64_t>(number_of_panel / op.panels_of_a_part) * op.cols;
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      const std::int32_t input = k + (j < count ? j : 0);
      const FourGroups group = groups_at<kCodes, Scale>(
          op, panel, table == nullptr ? input / op.group : table[input], first_row);
#pragma unroll
      for (int i = 0; i < kRowsEach; ++i) {
        numbers[i].x[j] = number<kCodes>(codes[j / kInputsOfAWord], i, j % 2 != 0, group);
      }
    }
  }
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    const std::int64_t row =
        static_cast<std::int64_t>(number_of_panel) * kPackedRows + first_row + i;
    store_eight(op.out + row * op.cols + k, numbers[i], count, op.aligned);
  }
}

template <Codes kCodes>
void unpack_codes(const Unpack& op, cudaStream_t stream) {
  const Matrix& weight = op.weight;
  const PackedPanel map = packed_panel(weight.packed, weight.cols);
  const std::int64_t parts = ceil_div(weight.cols, kInputsEach);
  with_type(weight.dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    auto* out = static_cast<T*>(op.out);
    const PanelsToUnpack<T> panels{.out = out,
                                   .panels = static_cast<const std::uint8_t*>(weight.data),
                                   .input_groups = weight.input_groups,
                                   .panel_bytes = map.bytes.n,
                                   .scales = map.scales,
                                   .zeros = map.zeros,
                                   .panels_of_a_part = weight.rows / weight.parts / kPackedRows,
                                   .cols = weight.cols,
                                   .group = weight.packed.group,
                                   .has_zeros = weight.packed.zero_points != 0,
                                   .aligned = in_eights(out, weight.cols)};
    with_type(weight.packed.scale_dtype, [&](auto* scale_type) {
      using Scale = std::remove_pointer_t<decltype(scale_type)>;
      launch("unpack", &unpack_kernel<kCodes, Scale, T>,
             {.blocks = weight.rows / kPackedRows * parts, .threads = kThreads}, stream, panels,
             static_cast<unsigned>(parts));
    });
  });
}

struct Bfloat12ToUnpack {
  std::uint16_t* out;          // (rows, cols)
  const std::uint8_t* panels;  // as common/formats/bfloat12.h draws them
  Bfloat12Panel map;
  std::int32_t cols;
  bool aligned;
};

// The exponent of the escape at `place`, which is its input << 12 | its row << 8; 0 where the table has none.
__device__ __noinline__ std::uint32_t escaped_exponent(const std::uint32_t* escapes,
                                                       std::int32_t room, std::uint32_t place) {
  std::int32_t low = 0, high = room;
  while (low < high) {
    const std::int32_t middle = (low + high) / 2;
    if (escapes[middle] < place) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low < room && (escapes[low] ^ place) < 256 ? escapes[low] & 255 : 0;
}

// As unpack_kernel: eight inputs of four rows a thread, all of one group.
__global__ void __launch_bounds__(kThreads)
    unpack_bfloat12_kernel(Bfloat12ToUnpack op, unsigned parts_of_a_panel) {
  static_assert(kBfloat12Group % kEight == 0);
  const std::int64_t number_of_panel = blockIdx.x / parts_of_a_panel;
  const int first_row = static_cast<int>(threadIdx.x % 4) * kRowsEach;
  const std::int32_t k = static_cast<std::int32_t>(blockIdx.x % parts_of_a_panel) * kInputsEach +
                         static_cast<std::int32_t>(threadIdx.x / 4) * kEight;
  if (k >= op.cols) {
    return;
  }
  const std::uint8_t* panel = op.panels + number_of_panel * op.map.bytes.n;
  const int count = op.cols - k < kEight ? op.cols - k : kEight;
  const auto word = [=](std::int64_t at) {
    return __ldcs(reinterpret_cast<const std::uint32_t*>(panel + at));
  };
  // Of a pair of inputs and four rows: bytes of row and input, and bytes of the row alone.
  uint2 rest[kEight / 2];
  std::uint32_t codes[kEight / 2];
#pragma unroll
  for (int j = 0; j < kEight / 2; ++j) {  // inputs beyond the last are not read
    const std::int64_t pair = (k / 2 + j) * kPackedRows + first_row;
    const bool there = 2 * j < count;
    rest[j] = there ? __ldcs(reinterpret_cast<const uint2*>(panel + 2 * pair)) : uint2{0, 0};
    codes[j] = there ? word(op.map.codes + pair) : 0;
  }
  const std::uint32_t bases = word(op.map.bases + k / kBfloat12Group * kPackedRows + first_row);
  const auto* escapes = reinterpret_cast<const std::uint32_t*>(panel + op.map.escapes);
#pragma unroll
  for (int i = 0; i < kRowsEach; ++i) {
    alignas(16) std::uint16_t numbers[kEight];
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      const std::uint32_t two_rows = i < 2 ? rest[j / 2].x : rest[j / 2].y;
      const std::uint32_t bits = two_rows >> (16 * (i % 2) + 8 * (j % 2)) & 0xff;
      const std::uint32_t code = codes[j / 2] >> (8 * i + 4 * (j % 2)) & 15;
      std::uint32_t exponent =
          code < kBfloat12Escape ? (bases >> (8 * i) & 0xff) - code : std::uint32_t{0};
      if (code == kBfloat12Escape && j < count) {
        exponent = escaped_exponent(
            escapes, op.map.room,
            static_cast<std::uint32_t>(k + j) << 12 | static_cast<std::uint32_t>(first_row + i) << 8);
      }
      numbers[j] =
          static_cast<std::uint16_t>((bits & 0x80) << 8 | exponent << 7 | (bits & 0x7f));
    }
    std::uint16_t* out = op.out + (number_of_panel * kPackedRows + first_row + i) * op.cols + k;
    if (op.aligned && count == kEight) {
      *reinterpret_cast<uint4*>(out) = *reinterpret_cast<const uint4*>(numbers);
    } else {
#pragma unroll
      for (int j = 0; j < kEight; ++j) {
        if (j < count) {
          out[j] = numbers[j];
        }
      }
    }
  }
}

void unpack_bfloat12(const Unpack& op, cudaStream_t stream) {
  const Matrix& weight = op.weight;
  require(weight.dtype == DType::bfloat16, "bfloat12 is of bfloat16 numbers");
  const std::int64_t parts = ceil_div(weight.cols, kInputsEach);
  auto* out = static_cast<std::uint16_t*>(op.out);
  const Bfloat12ToUnpack panels{.out = out,
                                .panels = static_cast<const std::uint8_t*>(weight.data),
                                .map = bfloat12_panel(weight.cols),
                                .cols = weight.cols,
                                .aligned = in_eights(out, weight.cols)};
  launch("unpack", &unpack_bfloat12_kernel,
         {.blocks = weight.rows / kPackedRows * parts, .threads = kThreads}, stream, panels,
         static_cast<unsigned>(parts));
}

}  // namespace

void unpack(const Unpack& op, cudaStream_t stream) {
  require(op.weight.packed.is_packed() && op.weight.rows % (kPackedRows * op.weight.parts) == 0,
          "what is unpacked is packed, in whole panels");
  switch (op.weight.packed.codes) {
    case Codes::int4:
      return unpack_codes<Codes::int4>(op, stream);
    case Codes::float8:
      return unpack_codes<Codes::float8>(op, stream);
    case Codes::bfloat12:
      return unpack_bfloat12(op, stream);
    default:
      return unpack_codes<Codes::int8>(op, stream);
  }
}

}  // namespace poise::cuda
