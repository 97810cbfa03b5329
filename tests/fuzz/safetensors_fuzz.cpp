// The header of a *.safetensors file. Input: the file's size as u64, then its first bytes (the header's length as u64, the
// header, perhaps more); what is between them is zeros. An accepted header is compared with what a plain JSON parser
// reads: the same tensors, which cover the file from the header to its end.

#include <map>

#include "common/files/json.h"
#include "loader/safetensors.h"
#include "tests/fuzz/fuzzing.h"

namespace poise::fuzzing {
namespace {

constexpr std::uint64_t kLargestFile = std::uint64_t{1} << 42;

std::uint64_t bits_of(const std::string& dtype) {
  static const std::map<std::string, std::uint64_t> bits{
      {"F4", 4},          {"F6_E2M3", 6},     {"F6_E3M2", 6}, {"I8", 8},   {"U8", 8},
      {"BOOL", 8},        {"F8_E4M3", 8},     {"F8_E5M2", 8}, {"I16", 16}, {"U16", 16},
      {"F8_E8M0", 8},     {"F16", 16},        {"BF16", 16},   {"I32", 32}, {"U32", 32},
      {"F8_E4M3FNUZ", 8}, {"F8_E5M2FNUZ", 8}, {"F32", 32},    {"I64", 64}, {"U64", 64},
      {"F64", 64},        {"C64", 64}};
  return bits.at(dtype);
}

void compare(const SafetensorsFile& file, std::string_view header, std::uint64_t size) {
  const auto read = nlohmann::json::parse(header);
  std::uint64_t end = sizeof(std::uint64_t) + header.size();
  const std::uint64_t begin = end;
  for (const StoredTensor& tensor : file.tensors()) {
    expect(tensor.begin == end, "a tensor begins where the one before it ends");
    end += static_cast<std::uint64_t>(tensor.bytes.n);
    const nlohmann::json& entry = read.at(tensor.name);
    expect(
        entry.at("dtype") == tensor.dtype && entry.at("shape") == tensor.shape &&
            entry.at("data_offsets") == nlohmann::json::array({tensor.begin - begin, end - begin}),
        "a tensor is what the header says");
    unsigned __int128 bits = bits_of(tensor.dtype);
    for (const std::int64_t extent : tensor.shape) {
      bits *= static_cast<std::uint64_t>(extent);
    }
    expect(bits == static_cast<unsigned __int128>(tensor.bytes.n) * 8,
           "a tensor has its shape's bytes");
  }
  expect(end == size, "the tensors end where the file ends");
  expect(read.size() == file.tensors().size() + read.count("__metadata__"),
         "each name is a tensor");
}

void run_safetensors(Input input) {
  const std::uint8_t* data = input.data();
  const std::size_t bytes = input.size();
  static const Folder folder;
  static const std::filesystem::path path = folder / "model.safetensors";
  constexpr std::size_t kLength = sizeof(std::uint64_t);
  if (bytes < 2 * kLength) {
    return;
  }
  const std::uint64_t size = read_at<std::uint64_t>(data, 0) % kLargestFile;
  std::string_view first = text_of({data + kLength, bytes - kLength});
  first = first.substr(0, size);
  folder.write("model.safetensors", first, size);
  refusal([&] {
    const SafetensorsFile file(path);
    const auto length = read_at<std::uint64_t>(data, kLength);
    std::string header(first.substr(kLength, length));
    compare(file, header, size);
  });
}

// Nearly always the header's length is right, so that the header is looked at.
std::size_t mutate_safetensors(std::uint8_t* data, std::size_t size, std::size_t most,
                               unsigned seed) {
  constexpr std::size_t kBegin = 2 * sizeof(std::uint64_t);
  size = LLVMFuzzerMutate(data, size, most);
  if (size >= kBegin && seed % 16 != 0) {
    write_at<std::uint64_t>(data, sizeof(std::uint64_t), size - kBegin);
  }
  return size;
}

}  // namespace

const Target kSafetensorsTarget{"safetensors", run_safetensors, mutate_safetensors};

}  // namespace poise::fuzzing
