"""Runs printed SPIR-V on a Vulkan driver directly, as a native launcher would: no other compiler reads it before."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from tilesmith.codegen import KernelIR

_STORAGE, _UNIFORM = 7, 6  # descriptor types
_HOST_VISIBLE_COHERENT = 6


class Device:
    """The first device of the first driver, with f16 where it has it."""

    def __init__(self) -> None:
        import vulkan as vk

        self.vk = vk
        app = vk.VkApplicationInfo(apiVersion=vk.VK_MAKE_VERSION(1, 2, 0))
        self.instance = vk.vkCreateInstance(vk.VkInstanceCreateInfo(pApplicationInfo=app), None)
        self.physical = vk.vkEnumeratePhysicalDevices(self.instance)[0]
        families = enumerate(vk.vkGetPhysicalDeviceQueueFamilyProperties(self.physical))
        family = next(k for k, f in families if f.queueFlags & vk.VK_QUEUE_COMPUTE_BIT)
        half = vk.VkPhysicalDeviceVulkan12Features(shaderFloat16=1)
        storage = vk.VkPhysicalDeviceVulkan11Features(pNext=half, storageBuffer16BitAccess=1)
        queues = [vk.VkDeviceQueueCreateInfo(queueFamilyIndex=family, pQueuePriorities=[1.0])]
        info = vk.VkDeviceCreateInfo(pNext=storage, pQueueCreateInfos=queues)
        self.device = vk.vkCreateDevice(self.physical, info, None)
        self.queue = vk.vkGetDeviceQueue(self.device, family, 0)
        self.pool = vk.vkCreateCommandPool(self.device, vk.VkCommandPoolCreateInfo(queueFamilyIndex=family), None)
        self.memory = vk.vkGetPhysicalDeviceMemoryProperties(self.physical)

    def buffer(self, data: bytes, usage: int):
        """A buffer of `data`, and its mapped memory."""
        vk = self.vk
        info = vk.VkBufferCreateInfo(size=len(data), usage=usage, sharingMode=0)
        buffer = vk.vkCreateBuffer(self.device, info, None)
        needs = vk.vkGetBufferMemoryRequirements(self.device, buffer)
        kind = next(
            k
            for k in range(self.memory.memoryTypeCount)
            if needs.memoryTypeBits >> k & 1
            and self.memory.memoryTypes[k].propertyFlags & _HOST_VISIBLE_COHERENT == _HOST_VISIBLE_COHERENT
        )
        info = vk.VkMemoryAllocateInfo(allocationSize=needs.size, memoryTypeIndex=kind)
        memory = vk.vkAllocateMemory(self.device, info, None)
        vk.vkBindBufferMemory(self.device, buffer, memory, 0)
        mapped = vk.vkMapMemory(self.device, memory, 0, len(data), 0)
        mapped[:] = data
        return buffer, mapped

    def pipeline(self, spirv: bytes, entry: str, kinds: list[int]):
        """Descriptor layout, pipeline layout and pipeline."""
        vk = self.vk
        module = vk.vkCreateShaderModule(
            self.device, vk.VkShaderModuleCreateInfo(codeSize=len(spirv), pCode=spirv), None
        )
        bindings = [
            vk.VkDescriptorSetLayoutBinding(binding=k, descriptorType=t, descriptorCount=1, stageFlags=32)
            for k, t in enumerate(kinds)
        ]
        info = vk.VkDescriptorSetLayoutCreateInfo(pBindings=bindings)
        descriptors = vk.vkCreateDescriptorSetLayout(self.device, info, None)
        info = vk.VkPipelineLayoutCreateInfo(pSetLayouts=[descriptors])
        layout = vk.vkCreatePipelineLayout(self.device, info, None)
        stage = vk.VkPipelineShaderStageCreateInfo(stage=32, module=module, pName=entry)
        info = vk.VkComputePipelineCreateInfo(stage=stage, layout=layout)
        pipelines = vk.vkCreateComputePipelines(self.device, None, 1, [info], None)
        return descriptors, layout, pipelines[0]

    def descriptor_set(self, layout, buffers: list, kinds: list[int]):
        """The buffers, bound."""
        vk = self.vk
        sizes = [vk.VkDescriptorPoolSize(type=t, descriptorCount=max(1, kinds.count(t))) for t in (_STORAGE, _UNIFORM)]
        info = vk.VkDescriptorPoolCreateInfo(maxSets=1, pPoolSizes=sizes)
        pool = vk.vkCreateDescriptorPool(self.device, info, None)
        info = vk.VkDescriptorSetAllocateInfo(descriptorPool=pool, pSetLayouts=[layout])
        bound = vk.vkAllocateDescriptorSets(self.device, info)[0]
        writes = []
        for k, ((buffer, _), kind) in enumerate(zip(buffers, kinds)):
            whole = vk.VkDescriptorBufferInfo(buffer=buffer, offset=0, range=2**64 - 1)
            writes.append(
                vk.VkWriteDescriptorSet(
                    dstSet=bound, dstBinding=k, descriptorCount=1, descriptorType=kind, pBufferInfo=[whole]
                )
            )
        vk.vkUpdateDescriptorSets(self.device, len(writes), writes, 0, None)
        return bound


@lru_cache(maxsize=1)
def device() -> Device | str:
    """The device, or the reason why there is none."""
    try:
        return Device()
    except ImportError:
        return "vulkan is not installed: pip install vulkan"
    except OSError as problem:
        return f"no Vulkan loader (apt install libvulkan1): {problem}"
    except Exception as problem:
        if type(problem).__module__.startswith("vulkan"):
            return f"no Vulkan driver (apt install mesa-vulkan-drivers): {problem!r}"
        raise


def run(ir: KernelIR, spirv: bytes, grid, tensors: dict[str, np.ndarray], scalars: dict) -> dict[str, np.ndarray]:
    """Copies of `tensors` after the launch."""
    d = device()
    vk = d.vk
    kinds = [_STORAGE] * len(ir.buffers) + [_UNIFORM] * bool(ir.scalars)
    buffers = [d.buffer(tensors[b.name].tobytes() + bytes(-tensors[b.name].nbytes % 4), 0x20) for b in ir.buffers]
    if ir.scalars:
        buffers.append(d.buffer(ir.pack_scalars(scalars), 0x10))
    descriptors, layout, pipeline = d.pipeline(spirv, ir.name, kinds)
    bound = d.descriptor_set(descriptors, buffers, kinds)
    info = vk.VkCommandBufferAllocateInfo(commandPool=d.pool, level=0, commandBufferCount=1)
    commands = vk.vkAllocateCommandBuffers(d.device, info)[0]
    vk.vkBeginCommandBuffer(commands, vk.VkCommandBufferBeginInfo())
    vk.vkCmdBindPipeline(commands, 1, pipeline)
    vk.vkCmdBindDescriptorSets(commands, 1, layout, 0, 1, [bound], 0, None)
    vk.vkCmdDispatch(commands, *grid)
    vk.vkEndCommandBuffer(commands)
    vk.vkQueueSubmit(d.queue, 1, [vk.VkSubmitInfo(pCommandBuffers=[commands])], vk.VK_NULL_HANDLE)
    vk.vkQueueWaitIdle(d.queue)
    out = {}
    for b, (_, mapped) in zip(ir.buffers, buffers):
        t = tensors[b.name]
        out[b.name] = np.frombuffer(bytes(mapped[:])[: t.nbytes], t.dtype).reshape(t.shape)
    return out
