// castiron emit --kernel gemm --shape 16x64 --codec bf16 --tokens 9 --numerics fast --isa avx512bf16 --threads 2
// 1144 lines, sha256 9ca6a48344b3f2c139f588d9ca6a2cba92bb1800023e07f1721bcf0b44a22d3d
                %49:5 = scf.for %43 = %c0 to %c6 step %c1 iter_args(%44 = %38, %45 = %39, %46 = %40, %47 = %41, %48 = %42) -> (vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>) {
                  %50 = arith.muli %43, %c8 : index
                  %51 = arith.addi %18, %50 : index
                  %52 = vector.load %m1[%27, %51, %c0] : memref<1x32x64xi8>, vector<64xi8>
                  %53 = vector.bitcast %52 : vector<64xi8> to vector<16xi32>
                  %54 = arith.addi %26, %43 : index
                  %55 = memref.load %m0[%c0, %25, %54, %c0, %c0] : memref<1x1x2x9x16xi32>
                  %56 = vector.broadcast %55 : i32 to vector<16xi32>
                  %57 = vector.bitcast %56 : vector<16xi32> to vector<32xbf16>
                  %58 = vector.bitcast %53 : vector<16xi32> to vector<32xbf16>
                  %59 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%44, %57, %58) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %60 = arith.addi %26, %43 : index
                  %61 = memref.load %m0[%c0, %25, %60, %c1, %c0] : memref<1x1x2x9x16xi32>
                  %62 = vector.broadcast %61 : i32 to vector<16xi32>
                  %63 = vector.bitcast %62 : vector<16xi32> to vector<32xbf16>
                  %64 = vector.bitcast %53 : vector<16xi32> to vector<32xbf16>
                  %65 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%45, %63, %64) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %66 = arith.addi %26, %43 : index
                  %67 = memref.load %m0[%c0, %25, %66, %c6, %c0] : memref<1x1x2x9x16xi32>
                  %68 = vector.broadcast %67 : i32 to vector<16xi32>
                  %69 = vector.bitcast %68 : vector<16xi32> to vector<32xbf16>
                  %70 = vector.bitcast %53 : vector<16xi32> to vector<32xbf16>
                  %71 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%46, %69, %70) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %72 = arith.addi %26, %43 : index
                  %73 = memref.load %m0[%c0, %25, %72, %c9, %c0] : memref<1x1x2x9x16xi32>
                  %74 = vector.broadcast %73 : i32 to vector<16xi32>
                  %75 = vector.bitcast %74 : vector<16xi32> to vector<32xbf16>
                  %76 = vector.bitcast %53 : vector<16xi32> to vector<32xbf16>
                  %77 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%47, %75, %76) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %78 = arith.addi %26, %43 : index
                  %79 = memref.load %m0[%c0, %25, %78, %c10, %c0] : memref<1x1x2x9x16xi32>
                  %80 = vector.broadcast %79 : i32 to vector<16xi32>
                  %81 = vector.bitcast %80 : vector<16xi32> to vector<32xbf16>
                  %82 = vector.bitcast %53 : vector<16xi32> to vector<32xbf16>
                  %83 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%48, %81, %82) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %84 = arith.muli %43, %c8 : index
                  %85 = arith.addi %84, %c1 : index
                  %86 = arith.addi %18, %85 : index
                  %87 = vector.load %m1[%27, %86, %c0] : memref<1x32x64xi8>, vector<64xi8>
                  %88 = vector.bitcast %87 : vector<64xi8> to vector<16xi32>
// 507 lines more
                  %596 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%561, %594, %595) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %597 = arith.addi %26, %43 : index
                  %598 = memref.load %m0[%c0, %25, %597, %c9, %c19] : memref<1x1x2x9x16xi32>
                  %599 = vector.broadcast %598 : i32 to vector<16xi32>
                  %600 = vector.bitcast %599 : vector<16xi32> to vector<32xbf16>
                  %601 = vector.bitcast %578 : vector<16xi32> to vector<32xbf16>
                  %602 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%567, %600, %601) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  %603 = arith.addi %26, %43 : index
                  %604 = memref.load %m0[%c0, %25, %603, %c10, %c19] : memref<1x1x2x9x16xi32>
                  %605 = vector.broadcast %604 : i32 to vector<16xi32>
                  %606 = vector.bitcast %605 : vector<16xi32> to vector<32xbf16>
                  %607 = vector.bitcast %578 : vector<16xi32> to vector<32xbf16>
                  %608 = llvm.call_intrinsic "llvm.x86.avx512bf16.dpbf16ps.512"(%573, %606, %607) : (vector<16xf32>, vector<32xbf16>, vector<32xbf16>) -> vector<16xf32>
                  scf.yield %584, %590, %596, %602, %608 : vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>, vector<16xf32>
                }
