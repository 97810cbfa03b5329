#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "common/trouble.h"

namespace poise::testing_support {

// The sentence with which `act` is refused before anything started; "nothing was refused" where it was not.
inline std::string complaint(const std::function<void()>& act) {
  try {
    act();
  } catch (const Failure& failure) {
    EXPECT_EQ(failure.code(), Exit::cannot_start);
    return failure.what();
  }
  return "nothing was refused";
}

}  // namespace poise::testing_support
