#pragma once
// A list or a text that many requests have in common, such as the prompt of a line with 128 choices: read as if it were its
// own, copied by reference, never changed. Threads may read it at once.

#include <concepts>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <type_traits>
#include <utility>

namespace poise {

template <typename T>
class SharedValue {
 public:
  SharedValue() = default;
  SharedValue(std::initializer_list<typename T::value_type> elements) : SharedValue(T(elements)) {}
  template <std::convertible_to<T> Value>
    requires(!std::same_as<std::remove_cvref_t<Value>, SharedValue>)
  SharedValue(Value&& value)
      : value_(std::make_shared<const T>(T(std::forward<Value>(value)))) {}

  operator const T&() const { return get(); }
  const T& get() const {
    static const T kNothing;
    return value_ ? *value_ : kNothing;
  }

  bool empty() const { return get().empty(); }
  std::size_t size() const { return get().size(); }
  auto begin() const { return get().begin(); }
  auto end() const { return get().end(); }
  const auto& front() const { return get().front(); }
  const auto& back() const { return get().back(); }
  const auto& operator[](std::size_t place) const { return get()[place]; }

  friend bool operator==(const SharedValue& a, const SharedValue& b) { return a.get() == b.get(); }

 private:
  std::shared_ptr<const T> value_;  // null: empty
};

}  // namespace poise
