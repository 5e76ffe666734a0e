#include "textflag.h"

// func Call(nr, a, b, c uint32) int32
TEXT ·Call(SB), NOSPLIT, $0-20
	MOVL nr+0(FP), AX
	MOVL a+4(FP), BX
	MOVL b+8(FP), CX
	MOVL c+12(FP), DX
	XORL SI, SI
	XORL DI, DI
	INT  $0x80
	MOVL AX, ret+16(FP)
	RET
