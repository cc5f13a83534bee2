// castiron emit --kernel gemm --shape 16x64 --codec q4_1 --tokens 9 --isa amx --threads 2
// 413 lines, sha256 d7e8dd7f2abe904fd498fcd2f0848e8f114cf6bfe79e13ac82ecfbe03b652c07
                  %250:1 = scf.for %248 = %c0 to %c1 step %c1 iter_args(%249 = %247) -> (!llvm.x86_amx) {
                    %251 = arith.divui %246, %c7 : index
                    %252 = arith.addi %251, %248 : index
                    %253 = arith.addi %227, %252 : index
                    %254 = arith.addi %244, %228 : index
                    %255 = arith.muli %254, %c47 : index
                    %256 = arith.index_cast %255 : index to i64
                    %257 = arith.addi %11, %256 : i64
                    %258 = llvm.inttoptr %257 : i64 to !llvm.ptr
                    %259 = llvm.call_intrinsic "llvm.x86.tileloadd64.internal"(%c49, %c46, %258, %c48) : (i16, i16, !llvm.ptr, i64) -> !llvm.x86_amx
                    %260 = arith.muli %226, %c6 : index
                    %261 = arith.addi %260, %253 : index
                    %262 = arith.muli %261, %c44 : index
                    %263 = arith.index_cast %262 : index to i64
                    %264 = arith.addi %9, %263 : i64
                    %265 = llvm.inttoptr %264 : i64 to !llvm.ptr
                    %266 = llvm.call_intrinsic "llvm.x86.tileloadd64.internal"(%c45, %c46, %265, %c48) : (i16, i16, !llvm.ptr, i64) -> !llvm.x86_amx
                    %267 = llvm.call_intrinsic "llvm.x86.tdpbf16ps.internal"(%c45, %c46, %c46, %249, %266, %259) : (i16, i16, i16, !llvm.x86_amx, !llvm.x86_amx, !llvm.x86_amx) -> !llvm.x86_amx
                    %268 = arith.addi %226, %c1 : index
                    %269 = arith.muli %268, %c6 : index
                    %270 = arith.addi %269, %253 : index
                    %271 = arith.muli %270, %c44 : index
                    %272 = arith.index_cast %271 : index to i64
                    %273 = arith.addi %9, %272 : i64
                    %274 = llvm.inttoptr %273 : i64 to !llvm.ptr
                    %275 = llvm.call_intrinsic "llvm.x86.tileloadd64.internal"(%c45, %c46, %274, %c48) : (i16, i16, !llvm.ptr, i64) -> !llvm.x86_amx
                    %276 = llvm.call_intrinsic "llvm.x86.tdpbf16ps.internal"(%c45, %c46, %c46, %267, %275, %259) : (i16, i16, i16, !llvm.x86_amx, !llvm.x86_amx, !llvm.x86_amx) -> !llvm.x86_amx
                    %277 = arith.addi %226, %c6 : index
                    %278 = arith.muli %277, %c6 : index
                    %279 = arith.addi %278, %253 : index
                    %280 = arith.muli %279, %c44 : index
                    %281 = arith.index_cast %280 : index to i64
                    %282 = arith.addi %9, %281 : i64
                    %283 = llvm.inttoptr %282 : i64 to !llvm.ptr
                    %284 = llvm.call_intrinsic "llvm.x86.tileloadd64.internal"(%c45, %c46, %283, %c48) : (i16, i16, !llvm.ptr, i64) -> !llvm.x86_amx
                    %285 = llvm.call_intrinsic "llvm.x86.tdpbf16ps.internal"(%c45, %c46, %c46, %276, %284, %259) : (i16, i16, i16, !llvm.x86_amx, !llvm.x86_amx, !llvm.x86_amx) -> !llvm.x86_amx
                    scf.yield %285 : !llvm.x86_amx
                  }
