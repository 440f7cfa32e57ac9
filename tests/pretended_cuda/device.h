// What the parts of the pretended device know of each other.
#pragma once
#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Allocator.h>

#include "queues.h"

namespace pretended {

constexpr auto CUDA = c10::DeviceType::CUDA;

c10::Allocator* device_allocator();
// The same bytes as a tensor of the CPU, which keeps nothing alive.
at::Tensor cpu_alias(const at::Tensor& tensor);

// Tasks run the kernels of the CPU alone: autograd, autocast and Python have seen the operation already.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView autograd;
  c10::impl::ExcludeDispatchKeyGuard python{c10::python_ks}, autocast{c10::autocast_dispatch_keyset};
};

struct OnDevice { // sets the current device of this thread, and puts the former back
  explicit OnDevice(int device) : before(current_device()) {
    if (device >= 0) current_device() = device;
  }
  ~OnDevice() { current_device() = before; }
  int before;
};

} // namespace pretended
