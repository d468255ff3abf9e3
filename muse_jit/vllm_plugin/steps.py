"""Which calls of a forward pass run through the runtime objects, and how they are reached.

Three places of the stock model are wrapped, each of which falls back to stock by itself:

    model.forward             the first layer's front: stream and attention input from the embedded tokens
    norm_residual_then_norm   the attention boundary, told apart by the layer's residual connection
    attention._project_output the o_proj partial sum without its all-reduce (decode builder only)

What a place hands to the next one is recognised by identity of the tensor, never by position: a tensor that stock
copied, sharded or gathered in between is another one, and stock goes on with it. The stream is updated in place, so
only a stream that was made in this very step and that nobody else holds is taken.
"""

import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from muse_jit.ops.attention_boundary import AttentionBoundary
from muse_jit.ops.layer_front import LayerFront
from muse_jit.ops.o_projection import OProjection

BOUNDARY_CALL = "norm_residual_then_norm"
STREAM_CLASS = "MuseSpark1xResidualStream"
_MARK = "_muse_jit_place"


class Place:
    """A layer's residual connection in the model: the steps it belongs to, and its boundary if it has one."""

    def __init__(self, steps: "Steps", layer: Any, boundary: AttentionBoundary | None) -> None:
        self.steps, self.boundary = steps, boundary
        self.post, self.pre = layer.post_attn_norm, layer.pre_ffn_norm

    def current(self, x: Any, pre_norm: Any) -> bool:
        """Whether the call is the boundary this was built from, with the same weights and gates still."""
        b = self.boundary
        if b is None or type(x) is not self.steps.stream_class:
            return False
        connection, post = x.connection, x.post_norm
        return (
            pre_norm is self.pre
            and post is self.post
            and connection.alpha is b.alpha
            and connection.beta is b.beta
            and pre_norm.weight is b.next_weight
            and (post.weight if post.has_weight else None) is b.post_weight
        )


class Steps:
    """The state of one model's forward passes, and what replaces stock calls in them.

    Args:
        backbone: the model with the layers.
        front: for the first layer, or None.
        max_rows: tokens of the largest step that is taken.
        takes: whether a step of so many tokens is taken, asked once a step.
    """

    def __init__(
        self, backbone: Any, front: LayerFront | None, *, max_rows: int, takes: Callable[[int], bool] | None = None
    ) -> None:
        self.backbone, self.front, self.max_rows = backbone, front, max_rows
        self._takes = takes
        self.stock_forward = backbone.forward
        self.stock_boundary, self.stream_class = stock_calls(type(backbone.layers[backbone.start_layer]))
        self.launches = {"front": 0, "boundary": 0, "o_proj": 0}
        self._undo: list[Callable[[], None]] = []
        self._forget()

    def _forget(self) -> None:
        self.active = False
        self.embedded: tuple[torch.Tensor, torch.Tensor] | None = None
        self.owned: torch.Tensor | None = None
        self.partial: torch.Tensor | None = None

    def install(
        self, boundaries: dict[Any, AttentionBoundary], projections: dict[Any, OProjection] | None = None
    ) -> None:
        """Wrap the stock calls: `boundaries` and `projections` by layer.

        Raises:
            ValueError: a stock function is not what this was written for; nothing is replaced then.
        """
        require_parameters(self.stock_forward, ["input_ids", "positions", "intermediate_tensors", "inputs_embeds"])
        projections = projections or {}
        for layer in projections:
            require_parameters(layer.self_attn._project_output, ["attn_output"])
        try:
            self._wrap(boundaries, projections)
        except BaseException:
            self.remove()
            raise
        replace_boundary_call(type(self.backbone.layers[self.backbone.start_layer]))

    def _wrap(self, boundaries: dict[Any, AttentionBoundary], projections: dict[Any, OProjection]) -> None:
        self._set(self.backbone, "forward", self._forward)
        if self.front is not None:
            norm = self.backbone.layers[0].self_attn.pre_qkv_proj_norm
            self._set(norm, "forward", self._first_norm(norm.forward))
        for layer in self.backbone.layers:
            if hasattr(layer, "add_attn"):
                self._mark(layer.add_attn, Place(self, layer, boundaries.get(layer)))
                self._mark(layer.add_ffn, Place(self, layer, None))
        for layer, projection in projections.items():
            attention = layer.self_attn
            self._set(attention, "_project_output", self._project(projection, attention._project_output))

    def remove(self) -> None:
        """Give every object its stock method back."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _set(self, owner: Any, name: str, value: Any) -> None:
        setattr(owner, name, value)  # on the instance, which torch's Module.__call__ and vLLM's look at first
        self._undo.append(lambda: delattr(owner, name))

    def _mark(self, connection: Any, place: Place) -> None:
        setattr(connection, _MARK, place)
        self._undo.append(lambda: delattr(connection, _MARK))

    def _forward(
        self, input_ids: Any, positions: torch.Tensor, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> Any:
        rows = positions.shape[-1]
        self._forget()
        self.active = (
            intermediate_tensors is None and 0 < rows <= self.max_rows and (self._takes is None or self._takes(rows))
        )
        try:
            if self.active and self.front is not None:
                inputs_embeds = self._embed(self.front, input_ids, inputs_embeds, rows)
            return self.stock_forward(input_ids, positions, intermediate_tensors, inputs_embeds)
        finally:
            self._forget()

    def _embed(self, front: LayerFront, input_ids: Any, inputs_embeds: Any, rows: int) -> torch.Tensor:
        """The stream that stock would make of the embedded tokens, and the first layer's normed input beside it."""
        x: torch.Tensor = self.backbone.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        if x.dtype not in front.INPUT_DTYPES or not fits(x, rows, front.hidden, x.dtype):
            return x
        stream = torch.empty(rows, front.hidden, dtype=torch.float32, device=x.device)
        out = torch.empty(rows, front.hidden, dtype=torch.bfloat16, device=x.device)
        front.run(x, stream, out)
        self.launches["front"] += 1
        self.embedded, self.owned = (stream, out), stream
        return stream

    def _first_norm(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        def forward(x: torch.Tensor, residual: Any = None, out_dtype: torch.dtype | None = None) -> Any:
            made, self.embedded = self.embedded, None
            if made is not None and x is made[0] and residual is None and out_dtype == torch.bfloat16:
                return made[1]
            return stock(x, residual, out_dtype)

        return forward

    def _project(self, projection: OProjection, stock: Callable[..., Any]) -> Callable[..., Any]:
        def project(attn_output: torch.Tensor) -> Any:
            rows = attn_output.shape[0]
            if not self.active or not fits(attn_output, rows, projection.inputs, torch.bfloat16):
                return stock(attn_output)
            out = torch.empty(rows, projection.weight.shape[0], dtype=torch.bfloat16, device=attn_output.device)
            self.partial = projection.run(attn_output, out)
            self.launches["o_proj"] += 1
            return self.partial

        return project

    def boundary(self, place: Place, x: Any, pre_norm: Any, out_dtype: Any, router_input: Any) -> Any:
        """A residual boundary of this model: through the runtime object where it can, else through stock."""
        branch: torch.Tensor = x.branch
        rows, width = branch.shape[0], pre_norm.hidden_size
        partial, self.partial = self.partial, None
        pending = bool(partial is not None and x.branch is partial)
        if partial is not None and not pending:
            raise RuntimeError("the o_proj partial sum of this step did not reach its attention boundary")
        owns = bool(self.owned is not None and x.stream is self.owned)
        b = place.boundary
        if (
            b is not None
            and self.active
            and router_input is None
            and out_dtype == torch.bfloat16
            and owns
            and pending == (b.all_reduce is not None)
            and place.current(x, pre_norm)
            and fits(branch, rows, width, torch.bfloat16)
            and fits(x.stream, rows, width, torch.float32)
        ):
            out = torch.empty_like(branch)
            b.run(branch, x.stream, out)
            self.launches["boundary"] += 1
            self.owned = None
            return out, x.stream
        if pending:
            if b is None or b.all_reduce is None:
                raise RuntimeError("the o_proj partial sum of this step was published and has no consumer")
            x.branch = b.all_reduce(x.branch)
        out, stream = self.stock_boundary(x, pre_norm, out_dtype=out_dtype, router_input=router_input)
        # Stock made it just now, and only the layer that called holds it.
        self.owned = stream if self.active and type(x) is self.stream_class else None
        return out, stream


def fits(tensor: torch.Tensor, rows: int, width: int, dtype: torch.dtype) -> bool:
    """Whether a tensor is what the kernels take: [rows, width], dtype, contiguous, aligned."""
    return (
        tensor.dtype == dtype
        and tensor.shape == (rows, width)
        and tensor.is_contiguous()
        and tensor.data_ptr() % (8 * dtype.itemsize) == 0
    )


def stock_calls(layer_class: type) -> tuple[Callable[..., Any], Any]:
    """The stock boundary function that a decoder layer's forward calls, and the class of what it takes.

    Raises:
        ValueError: the layer does not call it by that name, or it takes other arguments.
    """
    forward = layer_class.forward  # type: ignore[attr-defined]
    names = getattr(forward, "__globals__", {})
    function, stream_class = names.get(BOUNDARY_CALL), names.get(STREAM_CLASS)
    if function is None or BOUNDARY_CALL not in forward.__code__.co_names or not isinstance(stream_class, type):
        raise ValueError(f"{layer_class.__name__} has no {BOUNDARY_CALL} to replace")
    function = getattr(function, "muse_jit_stock", function)
    require_parameters(function, ["x", "pre_norm", "out_dtype", "router_input"])
    return function, stream_class


def replace_boundary_call(layer_class: type) -> None:
    """Have the layer class call the marked connections' steps first. Once per process; unmarked ones run stock."""
    names: dict[str, Any] = layer_class.forward.__globals__  # type: ignore[attr-defined]
    stock = names[BOUNDARY_CALL]
    if hasattr(stock, "muse_jit_stock"):
        return

    def norm_residual_then_norm(x: Any, pre_norm: Any, *, out_dtype: Any, router_input: Any = None) -> Any:
        place = getattr(x.connection, _MARK, None)
        if place is None:
            return stock(x, pre_norm, out_dtype=out_dtype, router_input=router_input)
        return place.steps.boundary(place, x, pre_norm, out_dtype, router_input)

    norm_residual_then_norm.muse_jit_stock = stock  # type: ignore[attr-defined]
    names[BOUNDARY_CALL] = norm_residual_then_norm


def require_parameters(function: Callable[..., Any], expected: list[str]) -> None:
    """Refuse a stock function whose parameters are others than those this was written for.

    Raises:
        ValueError: naming the function, what it takes and what was expected.
    """
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    if found != expected:
        name = getattr(function, "__qualname__", str(function))
        raise ValueError(f"{name} takes {', '.join(found)}; expected: {', '.join(expected)}")


def decode_step(contexts: types.ModuleType) -> Callable[[int], bool]:
    """The steps the decode builder takes: those of FULL decode graphs, decided while they are captured.

    Profiling, warm-up and eager steps are not captured, and PIECEWISE graphs are keyed by the number of tokens alone;
    they run stock. The answer is the same on all ranks.
    """

    def takes(rows: int) -> bool:
        if not torch.cuda.is_current_stream_capturing() or not contexts.is_forward_context_available():
            return False
        return bool(contexts.get_forward_context().cudagraph_runtime_mode.name != "PIECEWISE")

    return takes
