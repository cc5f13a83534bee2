// castiron emit --kernel gemm_few --shape 16x64 --codec q4_0 --tokens 2 --isa avx2 --threads 2
// 499 lines, sha256 1abae1585eb1f3ab7c64c8eb650f930537f0245360b1e5633bc61f5dc9cef0ff
            %19:2 = scf.for %16 = %c0 to %c2 step %c1 iter_args(%17 = %c5, %18 = %c5) -> (vector<8xf32>, vector<8xf32>) {
              %20 = arith.addi %16, %c6 : index
              %21 = arith.divui %20, %c2 : index
              %22 = arith.remui %20, %c2 : index
              %23 = arith.addi %10, %21 : index
              memref.prefetch %m3[%23, %22, %c0], read, locality<3>, data : memref<1x2x288xi8>
              %24 = arith.addi %10, %21 : index
              memref.prefetch %m3[%24, %22, %c7], read, locality<3>, data : memref<1x2x288xi8>
              %25 = arith.addi %10, %21 : index
              memref.prefetch %m3[%25, %22, %c8], read, locality<3>, data : memref<1x2x288xi8>
              %26 = arith.addi %10, %21 : index
              memref.prefetch %m3[%26, %22, %c9], read, locality<3>, data : memref<1x2x288xi8>
              %27 = arith.addi %10, %21 : index
              memref.prefetch %m3[%27, %22, %c10], read, locality<3>, data : memref<1x2x288xi8>
              %28 = arith.muli %9, %c3 : index
              %29 = vector.load %m3[%10, %16, %28] : memref<1x2x288xi8>, vector<16xi8>
              %30 = vector.bitcast %29 : vector<16xi8> to vector<8xf16>
              %31 = arith.extf %30 : vector<8xf16> to vector<8xf32>
              %32 = arith.mulf %31, %c11 : vector<8xf32>
              %33 = arith.addi %14, %c1 : index
              %34 = vector.broadcast %c12 : i32 to vector<8xi32>
              %35 = vector.broadcast %c12 : i32 to vector<8xi32>
              %36 = arith.muli %16, %c13 : index
              %37 = arith.muli %9, %c14 : index
              %38 = arith.addi %c14, %37 : index
              %39 = vector.load %m3[%10, %16, %38] : memref<1x2x288xi8>, vector<32xi8>
              %40 = vector.bitcast %39 : vector<32xi8> to vector<8xi32>
              %41 = arith.andi %40, %c15 : vector<8xi32>
              %42 = vector.bitcast %41 : vector<8xi32> to vector<32xi8>
              %43 = memref.load %m0[%14, %36] : memref<2x48xi32>
              %44 = vector.broadcast %43 : i32 to vector<8xi32>
              %45 = vector.bitcast %44 : vector<8xi32> to vector<32xi8>
              %46 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%42, %45) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %47 = memref.load %m0[%33, %36] : memref<2x48xi32>
              %48 = vector.broadcast %47 : i32 to vector<8xi32>
              %49 = vector.bitcast %48 : vector<8xi32> to vector<32xi8>
              %50 = llvm.call_intrinsic "llvm.x86.avx2.pmadd.ub.sw"(%42, %49) : (vector<32xi8>, vector<32xi8>) -> vector<16xi16>
              %51 = arith.shrui %40, %c16 : vector<8xi32>
              %52 = arith.andi %51, %c15 : vector<8xi32>
              %53 = vector.bitcast %52 : vector<8xi32> to vector<32xi8>
// 364 lines more
              %418 = arith.addi %417, %408 : vector<8xi32>
              %419 = arith.shli %292, %c26 : vector<8xi32>
              %420 = arith.addi %419, %416 : vector<8xi32>
              %421 = arith.sitofp %418 : vector<8xi32> to vector<8xf32>
              %422 = arith.sitofp %420 : vector<8xi32> to vector<8xf32>
              %423 = arith.mulf %421, %31 : vector<8xf32>
              %424 = memref.load %m1[%14, %16] : memref<2x2xf32>
              %425 = vector.broadcast %424 : f32 to vector<8xf32>
              %426 = math.fma %423, %425, %17 : vector<8xf32>
              %427 = arith.mulf %422, %31 : vector<8xf32>
              %428 = memref.load %m1[%33, %16] : memref<2x2xf32>
              %429 = vector.broadcast %428 : f32 to vector<8xf32>
              %430 = math.fma %427, %429, %18 : vector<8xf32>
              scf.yield %426, %430 : vector<8xf32>, vector<8xf32>
            }
