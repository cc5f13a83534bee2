// castiron emit --kernel gemm --shape 16x64 --codec bf16 --tokens 9 --numerics fast --isa avx512bf16 --threads 2
// 1246 lines, sha256 f7d0182df11115ea51be92b0ebde5b78b8c4a508983e0b22bdaaf6d4ae25db6e
                %88:5 = scf.for %82 = %c0 to %c6 step %c1 iter_args(%83 = %77, %84 = %78, %85 = %79, %86 = %80, %87 = %81) -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
                  %89 = arith.muli %82, %c39 : index
                  %90 = arith.addi %18, %89 : index
                  %91 = vector.load %m1[%66, %90, %c0] : memref<1x32x64xi8>, vector<64xi8>
                  %92 = vector.bitcast %91 : vector<64xi8> to vector<16xi32>
                  %93 = arith.addi %65, %82 : index
                  %94 = memref.load %m0[%c0, %64, %93, %c0, %c0] : memref<1x1x2x9x16xi32>
                  %95 = vector.broadcast %94 : i32 to vector<16xi32>
                  %96 = vector.bitcast %95 : vector<16xi32> to vector<32xbf16>
                  %97 = vector.bitcast %92 : vector<16xi32> to vector<32xbf16>
                  %98 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%83, %96, %97) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %99 = arith.addi %65, %82 : index
                  %100 = memref.load %m0[%c0, %64, %99, %c1, %c0] : memref<1x1x2x9x16xi32>
                  %101 = vector.broadcast %100 : i32 to vector<16xi32>
                  %102 = vector.bitcast %101 : vector<16xi32> to vector<32xbf16>
                  %103 = vector.bitcast %92 : vector<16xi32> to vector<32xbf16>
                  %104 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%84, %102, %103) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %105 = arith.addi %65, %82 : index
                  %106 = memref.load %m0[%c0, %64, %105, %c6, %c0] : memref<1x1x2x9x16xi32>
                  %107 = vector.broadcast %106 : i32 to vector<16xi32>
                  %108 = vector.bitcast %107 : vector<16xi32> to vector<32xbf16>
                  %109 = vector.bitcast %92 : vector<16xi32> to vector<32xbf16>
                  %110 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%85, %108, %109) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %111 = arith.addi %65, %82 : index
                  %112 = memref.load %m0[%c0, %64, %111, %c40, %c0] : memref<1x1x2x9x16xi32>
                  %113 = vector.broadcast %112 : i32 to vector<16xi32>
                  %114 = vector.bitcast %113 : vector<16xi32> to vector<32xbf16>
                  %115 = vector.bitcast %92 : vector<16xi32> to vector<32xbf16>
                  %116 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%86, %114, %115) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %117 = arith.addi %65, %82 : index
                  %118 = memref.load %m0[%c0, %64, %117, %c41, %c0] : memref<1x1x2x9x16xi32>
                  %119 = vector.broadcast %118 : i32 to vector<16xi32>
                  %120 = vector.bitcast %119 : vector<16xi32> to vector<32xbf16>
                  %121 = vector.bitcast %92 : vector<16xi32> to vector<32xbf16>
                  %122 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%87, %120, %121) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %123 = arith.muli %82, %c39 : index
                  %124 = arith.addi %123, %c1 : index
                  %125 = arith.addi %18, %124 : index
                  %126 = vector.load %m1[%66, %125, %c0] : memref<1x32x64xi8>, vector<64xi8>
                  %127 = vector.bitcast %126 : vector<64xi8> to vector<16xi32>
// 507 lines more
                  %635 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%600, %633, %634) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %636 = arith.addi %65, %82 : index
                  %637 = memref.load %m0[%c0, %64, %636, %c40, %c50] : memref<1x1x2x9x16xi32>
                  %638 = vector.broadcast %637 : i32 to vector<16xi32>
                  %639 = vector.bitcast %638 : vector<16xi32> to vector<32xbf16>
                  %640 = vector.bitcast %617 : vector<16xi32> to vector<32xbf16>
                  %641 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%606, %639, %640) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %642 = arith.addi %65, %82 : index
                  %643 = memref.load %m0[%c0, %64, %642, %c41, %c50] : memref<1x1x2x9x16xi32>
                  %644 = vector.broadcast %643 : i32 to vector<16xi32>
                  %645 = vector.bitcast %644 : vector<16xi32> to vector<32xbf16>
                  %646 = vector.bitcast %617 : vector<16xi32> to vector<32xbf16>
                  %647 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%612, %645, %646) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  scf.yield %623, %629, %635, %641, %647 : vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>
                }
