"""What a block of a GGUF file means where values come by the four or eight, as points of a grid: IQ1, IQ2 and IQ3.

An index names a point of the type's grid, and bits beside it the signs, or for IQ1 which way the point is moved. Each
number is one of at most 16 times the scale of its group, so that a weight has codes that name numbers of a table.
"""

from __future__ import annotations

import base64
import functools
import zlib
from collections.abc import Callable, Mapping

import torch

from inferplane.api.quant import Number
from inferplane.quantization.ggml_blocks import Blocks, fields, half

# A point has 4 or 8 digits, the first one least; a grid is some of the points in their order. Which, the format says
# by listing them: a bit for each possible point here, lowest first, deflated.
_GRID_256_OF_8 = (
    "c-nPRORB^$43oj#tB`je2YP^R=KfcCw)5@K5e=lV<VbEmf91ogR%p3E0BR^O#16P=^@J3)+t0mx___f>P^zDolEn6;is&dxI!#Zg_{KuzkVd4Mw`"
    "?l*l~*(z5~c8Qj-!-YZym34v`$TQ4<4*~)dpL;rq|+W4irx`d$&)6^vGb7UkLBrzcFbHqcf>sMFwRxr;MTG;*}m%Qlby-@@TSk)X7om@@#uKQIjU"
    "UWQ&$2&y}*gX5TV=Bc|Cuh1wL(2Kn3A3Yj<N%;gblzhT7_jxp@MF=lA5st5R^Hl2J=^JV`E{Z0D^#$6R7"
)
_GRID_512_OF_8 = (
    "c-mc2TdsvL2pkgnkBRPwCicH3cK=&BJX-bM<{ZTW!^|+oxJIi-qkD|rsuaR~iB<*?x~C4>8J0pJW<V>X*vo#SY&(-c)w(<-fCU6QVt|)*=>oJ=N8"
    "h~B3mmYKBw*Y)Ca<s*uvOak7T*la5<g=kAh?T96(5+bR(Mt@J=L5^n!u1sF+~=p=RjVCGbM+vDH*59tF!>kC`)-u3GzO}jM8X_r-*1ytubG*&a^i"
    "qGs?p-do}D8x2NWXU?%O)=7t88q040RdJ=Ak)9T+$YBcFD31^6BC_W+mG1}iEA-T}Oj@u6-pQ1yByIl9%`W3mW#F%j~<yh(N0zSL~oH^Zy%}}tQx"
    "4=M73#xoc?jNErTmD?iDs40;(&MG>YYMNuDE=SK;cc#9vM%q_=>7msuqjC"
)
_GRID_1024_OF_8 = (
    "c-n1JU5W-F3~NE(E9iYHjPDBe{#V(wI=kPpE5rQ7#3X8F%Z9aF@G^(h-0EI3Em0|W3^QwctZ7zp0a8G#rYWS&oF&YfEj@sgh^u5FBBgC>LAkBEEt"
    "arKv-X}c)kMD5E9g)N*35uFS6j&;COQ!QC2=T0oAzp}=fs8f?3xctXeG?g^dQAA!2(KVP=j1x!<Qgx@l7F)Pu!TMd$m>{ZzEray(N$AzRb24)#*U"
    "9zYZZF^+2!@EVQ9?ARiEH!J<ErE8usn4?()-BQhW*1pE<<S|Z6aT82aQO}QP4+el6zUY~*z7~Sl6pK?p!Q_DMIhH4w7?joIO9P^#Dw9CRS7mu8OB"
    "C|vDii4FoWN_zK9m?6y$}qXC*pyH_2f!)+bXep&HXz~CYasM7Fd3(JhmM~KIbkHJ7yU4;E692~{FNElHOf~Fzm+TBn!W(JyjC6"
)
_GRID_2048_OF_8 = (
    "c-k#eK}(!R7=CxE;dM-9V?RN1diSfb(^(PgE$L;EU0C#DLh=VZ*|bQ>IZZw%yXlwN6ha`hG?#HO$v6$G@ldv(umMk2dT8mb2WdTox*h^v8VtnDuD"
    "#8?@Vw9Syw7v(LR2?w<}y}3b9YJG^C&5*&qs>Nl?x;NhAB!%0hRecnsm$a2YwJ@;QqccSPG~@n#@N5uBY$^gNY22s7}?HYgoxmY#Y+!Ajh1yxWA4"
    "l1OzVO1-XRyWBes^wA;LAoBq<x!%nuPhFWp9`{&R@7DG%<XIwD^Is3Q$Jf@<B<<hd(0^?jzIHG8vQn*?-$Ub(LsHW&@kYNcQ%|}dP%c;av8KJU^m"
    "WiJv*28-WD<$YEG%#}+D!ES;XeDuFD(VlG#i@A4$V;H%7rH52w&LB_pg1xSvl=L<CZ@9?{WdkSxbxSuMq|l64F4MqT|O(RS}O@H(bLXvHn!_Ontv"
    "Sw2GXTKiD_6XGLxujp0!)qyF+V=7Bv?g3oFy??D1-6?{(2le%HQrc>Le(m#@Cb_P%)g$;r#{<KcsUbe#9?p_<1{H>jE?+1SCIq;Fwj@yPMjA_U90"
    "?}vdY$)D1%>fQq-z{36HBT$I&mG*v%J#A~V%aSj@pZtCEAg}V1eou`2@uUxU_YQ=)6;l3U7EjmAKr#y2F0kdO91c}@u6ikZ68>90+)KINV7E3oVy"
    "0wcNC7Qg*Gnz$6Ckekcj5w;yQl$8BcV}uIeIA*;9XR~L2uzcrHYS+2)y-rqrtcg6e{stpn$cM#il(dTBx(R&0u-;P1DmAvG}u@dX;b%ns9v~6p49"
    "X^c}lqEMlIFjzJBbrp$X4T{{D_p5YV7e^~xM<^E7<_56qcAaL=FI+lT|4v2#Y&dpW2-Egd@Fdf5G@Dheeu*|v(bMFD;1sQ1"
)
_GRID_256_OF_4 = (
    "c-l=-F%H5o3_M%0RAmZ7_lgPeigaLyA4Q!IuVCbv_?)J2Rn;aw-<^~BWtxCXwzFx0%xW)eST<YW5KL&L;j#hAAHoX-c)&}FY<X@1m|7IGsjrX>q7"
    "@bAuHrcP3L2_`6x)_>^v5;&o?@Fdagv_Uo9H*utGOGEJ93R6P|L2rgx{U}Y-UnrS3sKYtPIbF!WdDS7|dsT<9UQCqzhJe8+4kK5km%XvHjm=J(sM"
    "gqk-e3v^zjTJayVggoDWMJzTWE4a0T)3l-9P!ydlNePrBA?Xny*@kmBo4W|8$?wEo20v5Uy_5"
)
_GRID_512_OF_4 = (
    "c-k#d!AiqG5PdVu!e&pqA>uXNMyUCUt<-~hDT4SrX{pfmmf{D9Rs{Q#&TgE;z`Qr}-rMBob#A|%IbF{W(Id*&Lkwq!%0~0(%@Ao{OU0lD_x2OXCI"
    "^OquXIKLt}o^pYnG?L6&oz+9HeSVPSrN(A}t!YmF^Xmp*3Qy-5G8(e|b5Y-VC?q(AA>+32wuC)HmEXp@c1}PT|h83}iuXSwt^ePGkv?U+Lf3a_=1"
    "ov?9@{igP&9v4ypFswx3&TJZ@M2_=SuX>*z&qp%+CoXl)ge8!drA@5Agyn!FG+()?*sDei}n1QT95(J|p-wR7#Aht{0!Hx!aZfy;cl!bD4D3uqR("
    "zW`GY5;6>@R{_|3X$jRqNR^eu)^e<Ll^vCYlKPU1;QQ+o$IB(hKom+bHx0SXmXXwyZnVo8~6jd#wQ>"
)

_IQ2 = (8, 25, 43)
_IQ3_XXS = (4, 12, 20, 28, 36, 44, 52, 62)
_IQ3_S = (1, 3, 5, 7, 9, 11, 13, 15)
_IQ1 = (-1, 0, 1)
_IQ1_SHIFT = 0.125


@functools.cache
def _grid(packed: str, base: int, size: int) -> torch.Tensor:
    """uint8 ``[points, size]``, the digits of each point."""
    stored = torch.frombuffer(bytearray(zlib.decompress(base64.b85decode(packed))), dtype=torch.uint8)
    numbers = fields(stored, 1).nonzero()
    return (numbers // base ** torch.arange(size) % base).to(torch.uint8)


def _table(usual: tuple[float, ...], flipped: tuple[float, ...], like: torch.Tensor) -> torch.Tensor:
    """float32 [16]: numbers of points, and from 8 on those where the bit beside them is set."""
    rest = (0.0,) * (8 - len(usual))
    return torch.tensor([*usual, *rest, *flipped, *rest], dtype=torch.float32, device=like.device)


def _signed(numbers: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    return _table(numbers, tuple(-number for number in numbers), like)


def _blocks(
    grid: torch.Tensor, index: torch.Tensor, flips: torch.Tensor, scale: torch.Tensor, table: torch.Tensor
) -> Blocks:
    """``index: [rows, num_blocks, n]`` of points; ``flips: [rows, num_blocks, 32]``, a byte for 8 numbers whose lowest
    bit is the first one's."""
    digits = grid.to(index.device)[index.long()].flatten(2)
    codes = digits | (fields(flips, 1) << 3)
    return Blocks(4, codes[..., ::2] | (codes[..., 1::2] << 4), scale, number=Number.TABLE4, table=table)


def _words(blocks: torch.Tensor, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of each block as int16 or int32; what is moved down of them has to be masked."""
    return blocks[..., start:stop].contiguous().view(dtype)


def _even(seven: torch.Tensor) -> torch.Tensor:
    """Seven bits as a byte whose highest bit makes the number of those set even."""
    odd = seven ^ (seven >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    return (seven | (odd << 7)).to(torch.uint8)


def _signs_and_scales(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 ``[rows, num_blocks, 8]`` of four times seven bits of signs and a scale of four."""
    shifts = torch.tensor([0, 7, 14, 21], dtype=torch.int32, device=words.device)
    return _even((words.unsqueeze(-1) >> shifts) & 127).flatten(2), (words >> 28) & 15


def _iq2_xxs(blocks: torch.Tensor) -> Blocks:
    index = blocks[..., 2:].unflatten(-1, (8, 8))[..., :4].flatten(2)
    flips, scales = _signs_and_scales(_words(blocks, 2, 66, torch.int32)[..., 1::2])
    scale = half(blocks, 0).float() * (0.5 + scales) * 0.25
    return _blocks(_grid(_GRID_256_OF_8, 3, 8), index, flips, scale, _signed(_IQ2, blocks))


def _iq2_xs(blocks: torch.Tensor) -> Blocks:
    words = _words(blocks, 2, 66, torch.int16)
    scale = half(blocks, 0).float() * (0.5 + fields(blocks[..., 66:], 4)) * 0.25
    grid = _grid(_GRID_512_OF_8, 3, 8)
    return _blocks(grid, words & 511, _even((words >> 9) & 127), scale, _signed(_IQ2, blocks))


def _iq2_s(blocks: torch.Tensor) -> Blocks:
    index = blocks[..., 2:34].short() | (fields(blocks[..., 66:74], 2).short() << 8)
    scale = half(blocks, 0).float() * (0.5 + fields(blocks[..., 74:], 4)) * 0.25
    return _blocks(_grid(_GRID_1024_OF_8, 3, 8), index, blocks[..., 34:66], scale, _signed(_IQ2, blocks))


def _iq3_xxs(blocks: torch.Tensor) -> Blocks:
    flips, scales = _signs_and_scales(_words(blocks, 66, 98, torch.int32))
    scale = half(blocks, 0).float() * (0.5 + scales) * 0.5
    return _blocks(_grid(_GRID_256_OF_4, 8, 4), blocks[..., 2:66], flips, scale, _signed(_IQ3_XXS, blocks))


def _iq3_s(blocks: torch.Tensor) -> Blocks:
    index = blocks[..., 2:66].short() | (fields(blocks[..., 66:74], 1).short() << 8)
    scale = half(blocks, 0).float() * (1 + 2 * fields(blocks[..., 106:], 4))
    return _blocks(_grid(_GRID_512_OF_4, 8, 4), index, blocks[..., 74:106], scale, _signed(_IQ3_S, blocks))


def _moved(blocks: torch.Tensor) -> torch.Tensor:
    up, down = (tuple(number + shift for number in _IQ1) for shift in (_IQ1_SHIFT, -_IQ1_SHIFT))
    return _table(up, down, blocks)


def _iq1_s(blocks: torch.Tensor) -> Blocks:
    words = _words(blocks, 34, 50, torch.int16)
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int16, device=words.device)
    index = blocks[..., 2:34].short() | (((words.unsqueeze(-1) >> shifts) & 7) << 8).flatten(2)
    flips = torch.where(words < 0, 255, 0).to(torch.uint8).repeat_interleave(4, -1)
    scale = half(blocks, 0).float() * (2 * ((words >> 12) & 7) + 1)
    return _blocks(_grid(_GRID_2048_OF_8, 3, 8), index, flips, scale, _moved(blocks))


def _iq1_m(blocks: torch.Tensor) -> Blocks:
    high = fields(blocks[..., 32:48], 4)
    index = blocks[..., :32].short() | ((high & 7).short() << 8)
    flips = (high >> 3) * 255
    words = _words(blocks, 48, 56, torch.int16)
    # the float16 of a block is the highest four bits of its four words, which hold scales of three bits below
    quarters = (blocks[..., 49:56:2] >> 4).unflatten(-1, (2, 2))
    of_block = half(quarters[..., 0] | (quarters[..., 1] << 4), 0).float()
    shifts = torch.tensor([0, 3, 6, 9], dtype=torch.int16, device=words.device)
    scale = of_block * (2 * ((words.unsqueeze(-1) >> shifts) & 7).flatten(2) + 1)
    return _blocks(_grid(_GRID_2048_OF_8, 3, 8), index, flips, scale, _moved(blocks))


READERS: Mapping[str, Callable[[torch.Tensor], Blocks]] = {
    "IQ1_S": _iq1_s,
    "IQ1_M": _iq1_m,
    "IQ2_XXS": _iq2_xxs,
    "IQ2_XS": _iq2_xs,
    "IQ2_S": _iq2_s,
    "IQ3_XXS": _iq3_xxs,
    "IQ3_S": _iq3_s,
}
"""By the type's name."""
